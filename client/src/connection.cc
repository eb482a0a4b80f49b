#include "client/src/connection.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/socket_path.h"
#include "common/base/status_macros.h"

namespace weightbroker::client {
namespace {

std::shared_ptr<grpc::Channel> OpenChannel(const std::string& socket_path) {
  grpc::ChannelArguments arguments;
  // A connection of our own, even where another Client of this process has one to the same socket: an engine that is
  // torn down and made again must not inherit a back-off.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  // gRPC takes this for how long one attempt to connect may last. A broker that is busy or being replaced leaves
  // connects in the keeper's socket: they wait there for as long as the call's own deadline lets them.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 60'000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // A manifest arrives in large messages: let the service send one whole without waiting for window updates.
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 4 << 20);
  arguments.SetInt(GRPC_ARG_TCP_READ_CHUNK_SIZE, 256 << 10);
  return grpc::CreateCustomChannel("unix:" + socket_path, grpc::InsecureChannelCredentials(), arguments);
}

absl::Status NoService(const std::string& socket_path, const std::string& cause) {
  return MakeError(Reason::kServiceUnavailable,
                   absl::StrCat("no service answers at ", socket_path, ": ", cause,
                                "; start weightbrokerd, or name its socket (WEIGHTBROKER_SOCKET)"),
                   {{"socket", socket_path}, {"cause", cause}});
}

Reason ReasonFor(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::UNAVAILABLE:
      return Reason::kServiceUnavailable;
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return Reason::kDeadlineExceeded;
    case grpc::StatusCode::CANCELLED:
      return Reason::kCancelled;
    default:
      return Reason::kProtocolError;
  }
}

}  // namespace

Deadline DeadlineIn(std::chrono::milliseconds duration) {
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(duration.count(), GPR_TIMESPAN));
}

std::chrono::milliseconds Remaining(Deadline deadline) {
  const gpr_timespec left = gpr_time_sub(deadline, gpr_now(GPR_CLOCK_MONOTONIC));
  return std::chrono::milliseconds(std::max<int64_t>(0, gpr_time_to_millis(left)));
}

absl::StatusOr<std::shared_ptr<Connection>> Connection::Open(const std::string& socket_path) {
  std::string path = socket_path;
  if (path.empty()) {
    ASSIGN_OR_RETURN(path, DefaultSocketPath());
  }
  RETURN_IF_ERROR(CheckSocketPath(path));
  std::shared_ptr<Connection> connection(new Connection(std::move(path)));
  connection->channel_->GetState(/*try_to_connect=*/true);
  return connection;
}

Connection::Connection(std::string socket_path)
    : socket_path_(std::move(socket_path)),
      channel_(OpenChannel(socket_path_)),
      service_(v1::WeightBrokerService::NewStub(channel_)),
      admin_service_(v1::WeightBrokerAdminService::NewStub(channel_)) {}

absl::Status Connection::WaitUntilConnected(Deadline deadline) const {
  if (channel_->WaitForConnected(deadline)) return absl::OkStatus();
  return NoService(socket_path_, "the deadline passed");
}

absl::Status Connection::Call(Deadline deadline, const std::function<grpc::Status(grpc::ClientContext&)>& call) const {
  constexpr int kTries = 2;
  grpc::Status status;
  for (int i = 0; i < kTries; ++i) {
    grpc::ClientContext context;
    context.set_deadline(deadline);
    status = call(context);
    if (!IsTransportFailure(status)) break;
    LeaveBrokenConnection();
  }
  return ToStatus(status);
}

void Connection::LeaveBrokenConnection() const {
  // A call can fail before the channel has noticed that its connection is gone, and the next one would be put on the
  // same dead connection.
  constexpr std::chrono::milliseconds kTimeToNotice(200);
  if (channel_->GetState(/*try_to_connect=*/false) != GRPC_CHANNEL_READY) return;
  channel_->WaitForStateChange(GRPC_CHANNEL_READY, DeadlineIn(kTimeToNotice));
}

absl::Status Connection::ToStatus(const grpc::Status& status) const {
  if (status.ok()) return absl::OkStatus();
  if (IsTransportFailure(status)) return NoService(socket_path_, status.error_message());
  return FromGrpc(status);
}

bool IsTransportFailure(const grpc::Status& status) {
  return status.error_code() == grpc::StatusCode::UNAVAILABLE && status.error_details().empty();
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  if (!status.error_details().empty()) {
    absl::Status parsed = ParseRpcStatus(status.error_details());
    const bool same_error = static_cast<int>(parsed.code()) == static_cast<int>(status.error_code());
    if (same_error && !GetErrorDetails(parsed).reason.empty()) return parsed;
  }
  const absl::Status ours = MakeError(ReasonFor(status.error_code()), status.error_message(),
                                      {{"grpc_code", absl::StrCat(static_cast<int>(status.error_code()))}});
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  result.SetPayload(kErrorInfoTypeUrl, *ours.GetPayload(kErrorInfoTypeUrl));
  return result;
}

}  // namespace weightbroker::client
