// The connection to the service, and the rules that every call over it follows: a deadline, errors with their
// ErrorInfo, and one more try for a call that was in flight when the service died.
//
//   auto connection = Connection::Open("/run/weightbroker/weightbroker.sock");      // does not wait
//   v1::HealthResponse response;
//   absl::Status status = connection->Call(DeadlineIn(10s), [&](grpc::ClientContext& context) {
//     return connection->service().Health(&context, {}, &response);
//   });
//
// Thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "weightbroker/v1/weight_broker_admin_service.grpc.pb.h"
#include "weightbroker/v1/weight_broker_service.grpc.pb.h"

namespace weightbroker::client {

// A point in time by the monotonic clock: setting the system's clock moves no deadline.
using Deadline = gpr_timespec;
Deadline DeadlineIn(std::chrono::milliseconds duration);
std::chrono::milliseconds Remaining(Deadline deadline);  // at least 0

class Connection {
 public:
  // Begins to connect, without waiting. SOCKET_PATH_INVALID if no path is given and none can be derived, or it is too
  // long.
  static absl::StatusOr<std::shared_ptr<Connection>> Open(const std::string& socket_path);

  // SERVICE_UNAVAILABLE if no service answers before `deadline`.
  absl::Status WaitUntilConnected(Deadline deadline) const;

  // Makes a call, and once more if the connection broke under it.
  absl::Status Call(Deadline deadline, const std::function<grpc::Status(grpc::ClientContext&)>& call) const;

  // To be called between a transport failure and the next try: waits a moment for the channel to notice.
  void LeaveBrokenConnection() const;

  // What a call came back with, as one of our errors. SERVICE_UNAVAILABLE if it did not reach the service.
  absl::Status ToStatus(const grpc::Status& status) const;

  const std::string& socket_path() const { return socket_path_; }
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  v1::WeightBrokerService::Stub& service() const { return *service_; }
  v1::WeightBrokerAdminService::Stub& admin_service() const { return *admin_service_; }

 private:
  explicit Connection(std::string socket_path);

  const std::string socket_path_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::WeightBrokerService::Stub> service_;
  const std::unique_ptr<v1::WeightBrokerAdminService::Stub> admin_service_;
};

// Whether the connection broke under the call, or could not be made: the service itself has said nothing.
bool IsTransportFailure(const grpc::Status& status);

// The error in `status`, read from its google.rpc.Status details; a code without details stays without a reason.
absl::Status FromGrpc(const grpc::Status& status);

}  // namespace weightbroker::client
