// WeightBrokerService over gRPC's callback API. No method blocks the thread it is called in: what reads files or
// asks a GPU's driver goes to a worker. Thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/broker/service_context.h"
#include "server/broker/spec_resolution.h"
#include "weightbroker/v1/weight_broker_service.grpc.pb.h"

namespace weightbroker {

// Export is raw, because its messages are serialized already; the others are typed. Reflection sees no difference.
using WeightBrokerServiceBase = v1::WeightBrokerService::WithCallbackMethod_Register<
    v1::WeightBrokerService::WithCallbackMethod_Fingerprint<v1::WeightBrokerService::WithRawCallbackMethod_Export<
        v1::WeightBrokerService::WithCallbackMethod_AllocateSlabs<v1::WeightBrokerService::WithCallbackMethod_Commit<
            v1::WeightBrokerService::WithCallbackMethod_Health<v1::WeightBrokerService::WithCallbackMethod_ReportDamage<
                v1::WeightBrokerService::WithCallbackMethod_ReportAttach<v1::WeightBrokerService::Service>>>>>>>>;

class WeightBrokerServiceImpl final : public WeightBrokerServiceBase {
 public:
  // `context` must outlive the service.
  explicit WeightBrokerServiceImpl(const ServiceContext& context) : context_(context) {}

  grpc::ServerWriteReactor<v1::RegisterResponse>* Register(grpc::CallbackServerContext* grpc_context,
                                                           const v1::RegisterRequest* request) override;
  grpc::ServerUnaryReactor* Fingerprint(grpc::CallbackServerContext* grpc_context,
                                        const v1::FingerprintRequest* request,
                                        v1::FingerprintResponse* response) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Export(grpc::CallbackServerContext* grpc_context,
                                                     const grpc::ByteBuffer* request) override;
  grpc::ServerUnaryReactor* AllocateSlabs(grpc::CallbackServerContext* grpc_context,
                                          const v1::AllocateSlabsRequest* request,
                                          v1::AllocateSlabsResponse* response) override;
  grpc::ServerReadReactor<v1::CommitRequest>* Commit(grpc::CallbackServerContext* grpc_context,
                                                     v1::CommitResponse* response) override;
  grpc::ServerUnaryReactor* Health(grpc::CallbackServerContext* grpc_context, const v1::HealthRequest* request,
                                   v1::HealthResponse* response) override;
  grpc::ServerUnaryReactor* ReportDamage(grpc::CallbackServerContext* grpc_context,
                                         const v1::ReportDamageRequest* request,
                                         v1::ReportDamageResponse* response) override;
  grpc::ServerUnaryReactor* ReportAttach(grpc::CallbackServerContext* grpc_context,
                                         const v1::ReportAttachRequest* request,
                                         v1::ReportAttachResponse* response) override;

 private:
  absl::Status TakeReport(const v1::ReportAttachRequest& request) const;
  absl::Status AnswerReport(const v1::ReportDamageRequest& request, const Peer& peer,
                            v1::ReportDamageResponse* response) const;
  absl::Status AnswerFingerprint(const v1::FingerprintRequest& request, v1::FingerprintResponse* response) const;
  absl::Status AnswerFingerprintOfAlias(const std::string& alias, v1::FingerprintResponse* response) const;
  absl::StatusOr<weightbroker::Fingerprint> FingerprintFor(const v1::FingerprintRequest& request,
                                                           const ResolvedSpec& resolved, const SetsOfSpec& found) const;
  void FillDesired(v1::HealthResponse* response) const;
  void FillHealth(const HealthFacts::Facts& facts, v1::HealthResponse* response) const;

  const ServiceContext& context_;
};

}  // namespace weightbroker
