// The connection to the service, and the rules that every call over it follows: a deadline, errors with their
// ErrorInfo, patience with a service that is being replaced, and another try for a call that was in flight then.
//
//   auto connection = Connection::Open({.socket_path = "/run/weightbroker/weightbroker.sock"});      // does not wait
//   v1::HealthResponse response;
//   absl::Status status = (*connection)->Call(DeadlineIn(10s), [&](grpc::ClientContext& context) {
//     return (*connection)->service().Health(&context, {}, &response);
//   });
//
// Thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/daemon.h"
#include "weightbroker/v1/weight_broker_admin_service.grpc.pb.h"
#include "weightbroker/v1/weight_broker_service.grpc.pb.h"

namespace weightbroker::client {

// A point in time by the monotonic clock: setting the system's clock moves no deadline.
using Deadline = gpr_timespec;
Deadline DeadlineIn(std::chrono::milliseconds duration);
std::chrono::milliseconds Remaining(Deadline deadline);  // at least 0
Deadline Sooner(Deadline a, Deadline b);

struct ConnectionOptions {
  std::string socket_path = {};  // empty: the default
  // Starts a service where none answers. Its socket is the connection's.
  std::optional<DaemonSettings> daemon = std::nullopt;
  // For how long a socket that nobody listens on is waited for before the connection is there for the first time;
  // unset: for as long as a call may wait at all. A keeper holds the socket while it replaces its broker, so that
  // connects are refused only where there is neither: a service that its manager restarts, or that has gone for good.
  std::optional<std::chrono::milliseconds> refusal_patience = std::nullopt;
};

class Connection {
 public:
  using Try = std::function<grpc::Status(grpc::ClientContext&)>;

  // Begins to connect, without waiting. SOCKET_PATH_INVALID if no path is given and none can be derived, or it is too
  // long.
  static absl::StatusOr<std::shared_ptr<Connection>> Open(const ConnectionOptions& options);

  // Waits until a service answers, after starting one if that is wanted and nobody listens. SERVICE_UNAVAILABLE at
  // `deadline`; and at once if this user may not connect, if the path is of something else than a socket, or if there
  // is no socket and this connection has never had one: then no service is being replaced, there is none. The same
  // after `refusal_patience`, if that is set, of a socket that nobody listens on. SERVICE_NOT_STARTED if it could not
  // be started.
  absl::Status Reach(Deadline deadline) const;

  // The same, but a service that has never been there is waited for, too.
  absl::Status WaitUntilConnected(Deadline deadline) const;

  // Makes a call that may be made twice, again if its service was lost under it: see Attempts.
  absl::Status Call(Deadline deadline, const Try& call) const;

  // Makes a call that must not be made twice unasked. SERVICE_UNAVAILABLE leaves open whether it was carried out.
  absl::Status CallOnce(Deadline deadline, const Try& call) const;

  // What a call came back with, as one of our errors. SERVICE_UNAVAILABLE if the service itself has said nothing.
  absl::Status ToStatus(const grpc::Status& status) const;

  // Waits until the connection is another than it was, or `deadline`.
  void WaitForChange(Deadline deadline) const;

  const std::string& socket_path() const { return socket_path_; }
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  v1::WeightBrokerService::Stub& service() const { return *service_; }
  v1::WeightBrokerAdminService::Stub& admin_service() const { return *admin_service_; }

 private:
  Connection(std::string socket_path, std::optional<Daemon> daemon,
             std::optional<std::chrono::milliseconds> refusal_patience);

  absl::Status CheckWorthWaiting() const;
  absl::Status Once(Deadline deadline, const Try& call) const;

  const std::string socket_path_;
  const std::optional<Daemon> daemon_;
  const std::optional<std::chrono::milliseconds> refusal_patience_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::WeightBrokerService::Stub> service_;
  const std::unique_ptr<v1::WeightBrokerAdminService::Stub> admin_service_;
  mutable std::atomic<bool> reached_{false};  // whether a service has ever answered
};

// How often, and after what, a call is made again that may be made twice.
//
//   Attempts attempts(connection, deadline);
//   while (true) {
//     RETURN_IF_ERROR(attempts.Begin());
//     const absl::Status status = Try();
//     if (status.ok() || !attempts.ShallTryAgain(status)) return status;
//   }
//
// Not thread-safe.
class Attempts {
 public:
  Attempts(const Connection& connection, Deadline deadline) : connection_(connection), deadline_(deadline) {}

  // Before each try: waits until a service answers, as Connection::Reach does.
  absl::Status Begin() const;

  // After a try that failed with `status`. Waits a little before it says yes.
  bool ShallTryAgain(const absl::Status& status);

 private:
  bool ShallOutwaitADrain();
  bool ShallFollowALostOne();

  const Connection& connection_;
  const Deadline deadline_;
  int lost_ = 0;                        // tries that ended with their broker
  std::optional<Deadline> drained_by_;  // when a service that is shutting down should have gone
};

// Whether the connection broke under the call, or could not be made: the service itself has said nothing.
bool IsTransportFailure(const grpc::Status& status);

// The error in `status`, read from its google.rpc.Status details; a code without details stays without a reason.
absl::Status FromGrpc(const grpc::Status& status);

}  // namespace weightbroker::client
