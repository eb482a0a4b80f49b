// A service that answers as a test tells it to, behind the real endpoint: gRPC and tickets on one socket.
//
//   FakeService service;
//   service.on_export = [&](auto& call) { return call.Serve([](auto& header) { header.clear_ticket(); }); };
//   Connection::Open({.socket_path = service.socket_path()})
//
// It holds one slab with two tensors, "a" (4 x 3 BF16) and "b" (100 U8).
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/memory/host_slab.h"
#include "server/endpoint/endpoint.h"
#include "server/endpoint/listener.h"
#include "server/endpoint/ticket_box.h"
#include "weightbroker/v1/weight_broker_admin_service.grpc.pb.h"
#include "weightbroker/v1/weight_broker_service.grpc.pb.h"

namespace weightbroker::testing {

// Ends the connection under a call, as the death of a service does. Gives what to end the call with.
grpc::Status BreakConnectionUnder(grpc::ServerContext& context);

grpc::Status ToGrpc(const absl::Status& status);

class FakeService : private v1::WeightBrokerService::Service, private v1::WeightBrokerAdminService::Service {
 public:
  class ExportCall;
  using ExportHook = std::function<grpc::Status(ExportCall&)>;
  using RegisterHook =
      std::function<grpc::Status(const v1::RegisterRequest&, grpc::ServerWriter<v1::RegisterResponse>&)>;
  using UnregisterHook = std::function<grpc::Status(grpc::ServerContext&, v1::UnregisterResponse&)>;
  using ListHook = std::function<void(v1::ListWeightSetsResponse&)>;

  FakeService();
  ~FakeService() override;

  const std::string& socket_path() const { return listener_->path(); }
  std::string fingerprint() const { return std::string(64, 'f'); }

  // How many Export streams are open.
  int open_exports() const { return open_exports_; }
  int export_count() const { return export_count_; }  // without renewals

  // Set before the first call.
  ExportHook on_export;
  ExportHook on_renewal;  // NOT_RESIDENT unless set
  UnregisterHook on_unregister;
  ListHook on_list;  // no sets unless set
  RegisterHook on_register;
  std::function<grpc::Status(const v1::FingerprintRequest&, v1::FingerprintResponse*)> on_fingerprint;
  v1::UnregisterRequest unregistered;  // what the last call of it asked for

  // Puts another slab in the place of the service's own, with the same two tensors in it.
  void ReplaceSlab(UniqueFd fd, int64_t size_bytes);
  // What lies in the slab.
  static std::string SlabContents();

 private:
  grpc::Status Fingerprint(grpc::ServerContext* context, const v1::FingerprintRequest* request,
                           v1::FingerprintResponse* response) override;
  grpc::Status Export(grpc::ServerContext* context, const v1::ExportRequest* request,
                      grpc::ServerWriter<v1::ExportResponse>* writer) override;
  grpc::Status AnswerExport(ExportCall& call);
  grpc::Status AnswerRenewal(ExportCall& call);
  grpc::Status Register(grpc::ServerContext* context, const v1::RegisterRequest* request,
                        grpc::ServerWriter<v1::RegisterResponse>* writer) override;
  grpc::Status Unregister(grpc::ServerContext* context, const v1::UnregisterRequest* request,
                          v1::UnregisterResponse* response) override;
  grpc::Status ListWeightSets(grpc::ServerContext* context, const v1::ListWeightSetsRequest* request,
                              v1::ListWeightSetsResponse* response) override;

  std::string folder_;
  std::optional<Listener> listener_;
  TicketBox tickets_;
  PeerTable peers_;
  SharedFds fds_;
  int64_t slab_bytes_ = 0;
  std::vector<v1::Tensor> rows_;
  std::atomic<int> open_exports_{0};
  std::atomic<int> export_count_{0};
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Endpoint> endpoint_;
};

// One Export, as a hook sees it.
class FakeService::ExportCall {
 public:
  ExportCall(FakeService& service, grpc::ServerContext& context, const v1::ExportRequest& request,
             grpc::ServerWriter<v1::ExportResponse>& writer)
      : service_(service), context_(context), request_(request), writer_(writer) {}

  const v1::ExportRequest& request() const { return request_; }

  // Sends the header and the manifest, as `change_header` and `change_manifest` leave them (each may be null).
  void Send(const std::function<void(v1::ExportHeader&)>& change_header = nullptr,
            const std::function<void(v1::ManifestChunk&)>& change_manifest = nullptr);
  // Sends the header of a renewal, as `change_header` leaves it.
  void SendRenewal(const std::function<void(v1::ExportHeader&)>& change_header = nullptr);
  void SendEvent(const std::string& message);
  // Until the client has gone.
  grpc::Status Hold();
  // Ends the connection under the call, as the death of a service does.
  grpc::Status BreakConnection();

 private:
  void FillHeader(v1::ExportHeader* header) const;

  FakeService& service_;
  grpc::ServerContext& context_;
  const v1::ExportRequest& request_;
  grpc::ServerWriter<v1::ExportResponse>& writer_;
};

}  // namespace weightbroker::testing
