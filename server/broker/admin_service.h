// WeightBrokerAdminService over gRPC's callback API. Thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>

#include "absl/status/status.h"
#include "server/broker/service_context.h"
#include "weightbroker/v1/weight_broker_admin_service.grpc.pb.h"

namespace weightbroker {

class AdminServiceImpl final : public v1::WeightBrokerAdminService::CallbackService {
 public:
  // `context` must outlive the service.
  explicit AdminServiceImpl(const ServiceContext& context) : context_(context) {}

  grpc::ServerUnaryReactor* ListWeightSets(grpc::CallbackServerContext* grpc_context,
                                           const v1::ListWeightSetsRequest* request,
                                           v1::ListWeightSetsResponse* response) override;
  // Ending a load waits for its loader to end, so a worker does it.
  grpc::ServerUnaryReactor* Unregister(grpc::CallbackServerContext* grpc_context, const v1::UnregisterRequest* request,
                                       v1::UnregisterResponse* response) override;
  // The vault is told before the change is seen, so a worker does it.
  grpc::ServerUnaryReactor* SetAlias(grpc::CallbackServerContext* grpc_context, const v1::SetAliasRequest* request,
                                     v1::SetAliasResponse* response) override;
  grpc::ServerUnaryReactor* DeleteAlias(grpc::CallbackServerContext* grpc_context,
                                        const v1::DeleteAliasRequest* request,
                                        v1::DeleteAliasResponse* response) override;
  grpc::ServerWriteReactor<v1::ScrubResponse>* Scrub(grpc::CallbackServerContext* grpc_context,
                                                     const v1::ScrubRequest* request) override;

 private:
  absl::Status AnswerUnregister(const v1::UnregisterRequest& request, v1::UnregisterResponse* response) const;

  const ServiceContext& context_;
};

}  // namespace weightbroker
