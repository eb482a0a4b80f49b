#include "client/src/connection.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/socket_path.h"
#include "common/base/status_macros.h"

namespace weightbroker::client {
namespace {

using std::chrono::milliseconds;

// A service that stays away for longer has gone for good, however long a load would have been waited for.
constexpr milliseconds kMaxAbsence(60'000);

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

absl::Status NoService(
    const std::string& socket_path, const std::string& cause,
    const std::string& what_to_do = "start weightbrokerd, or name its socket (WEIGHTBROKER_SOCKET)") {
  return MakeError(Reason::kServiceUnavailable,
                   absl::StrCat("no service answers at ", socket_path, ": ", cause, "; ", what_to_do),
                   {{"socket", socket_path}, {"cause", cause}});
}

absl::Status NoAnswerInTime(const std::string& socket_path) {
  if (!SomebodyListens(socket_path)) return NoService(socket_path, "the deadline passed");
  return NoService(socket_path, "the deadline passed, though somebody listens there",
                   "allow more time; if that does not help, the service hangs: see its log");
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

// Tells a socket that nobody listens on for good from one that somebody is about to listen on.
class Refusals {
 public:
  Refusals(const std::string& socket_path, milliseconds patience) : socket_path_(socket_path), patience_(patience) {}

  // SERVICE_UNAVAILABLE if there has been nobody for so long.
  absl::Status Look() {
    const auto now = std::chrono::steady_clock::now();
    if (SomebodyListens(socket_path_)) {
      last_seen_ = now;
    } else if (now - last_seen_ >= patience_) {
      return NoService(socket_path_, "the socket is there, but the service that made it has gone");
    }
    return absl::OkStatus();
  }

 private:
  const std::string& socket_path_;
  const milliseconds patience_;
  std::chrono::steady_clock::time_point last_seen_ = std::chrono::steady_clock::now();  // or when looking began
};

}  // namespace

Deadline DeadlineIn(milliseconds duration) {
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(duration.count(), GPR_TIMESPAN));
}

milliseconds Remaining(Deadline deadline) {
  const gpr_timespec left = gpr_time_sub(deadline, gpr_now(GPR_CLOCK_MONOTONIC));
  return milliseconds(std::max<int64_t>(0, gpr_time_to_millis(left)));
}

Deadline Sooner(Deadline a, Deadline b) { return gpr_time_cmp(a, b) < 0 ? a : b; }

absl::StatusOr<std::shared_ptr<Connection>> Connection::Open(const ConnectionOptions& options) {
  DefaultSocket socket{options.socket_path, false};
  if (socket.path.empty()) {
    ASSIGN_OR_RETURN(socket, FindDefaultSocket());
  }
  RETURN_IF_ERROR(CheckSocketPath(socket.path));
  std::optional<Daemon> daemon;
  if (options.daemon.has_value()) daemon.emplace(*options.daemon, socket);
  std::shared_ptr<Connection> connection(
      new Connection(std::move(socket.path), std::move(daemon), options.refusal_patience));
  connection->channel_->GetState(/*try_to_connect=*/true);
  return connection;
}

Connection::Connection(std::string socket_path, std::optional<Daemon> daemon,
                       std::optional<milliseconds> refusal_patience)
    : socket_path_(std::move(socket_path)),
      daemon_(std::move(daemon)),
      refusal_patience_(refusal_patience),
      channel_(OpenChannel(socket_path_)),
      service_(v1::WeightBrokerService::NewStub(channel_)),
      admin_service_(v1::WeightBrokerAdminService::NewStub(channel_)) {}

absl::Status Connection::Reach(Deadline deadline) const {
  // A channel that fails again and again does not say so again.
  constexpr milliseconds kLookInterval(50);
  std::optional<Daemon::Started> started;
  Refusals refusals(socket_path_, refusal_patience_.value_or(milliseconds::max()));
  bool hurried = false;
  while (true) {
    Deadline look_again = deadline;
    const grpc_connectivity_state state = channel_->GetState(/*try_to_connect=*/true);
    if (state == GRPC_CHANNEL_READY) {
      reached_ = true;
      return absl::OkStatus();
    }
    if (state == GRPC_CHANNEL_TRANSIENT_FAILURE) {
      if (daemon_.has_value() && !SomebodyListens(socket_path_)) {
        if (started.has_value()) return daemon_->Ended(*started);
        ASSIGN_OR_RETURN(started, daemon_->Start(Remaining(deadline)));
        hurried = false;
      }
      RETURN_IF_ERROR(CheckWorthWaiting());
      if (refusal_patience_.has_value() && !reached_) RETURN_IF_ERROR(refusals.Look());
      // What has failed before is tried again at once, not when the channel's back-off ends; but once only.
      if (!hurried) grpc::experimental::ChannelResetConnectionBackoff(channel_.get());
      hurried = true;
      look_again = Sooner(deadline, DeadlineIn(kLookInterval));
    }
    if (channel_->WaitForStateChange(state, look_again)) continue;
    if (Remaining(deadline).count() == 0) return NoAnswerInTime(socket_path_);
  }
}

absl::Status Connection::WaitUntilConnected(Deadline deadline) const {
  if (daemon_.has_value()) return Reach(deadline);
  if (!channel_->WaitForConnected(deadline)) return NoAnswerInTime(socket_path_);
  reached_ = true;
  return absl::OkStatus();
}

absl::Status Connection::CheckWorthWaiting() const {
  struct stat status {};
  if (stat(socket_path_.c_str(), &status) == 0 && !S_ISSOCK(status.st_mode)) {
    return NoService(socket_path_, S_ISDIR(status.st_mode) ? "it is a folder" : "it is no socket");
  }
  if (faccessat(AT_FDCWD, socket_path_.c_str(), W_OK, AT_EACCESS) == 0) return absl::OkStatus();
  const bool is_missing = errno == ENOENT || errno == ENOTDIR;
  if (is_missing && reached_) return absl::OkStatus();  // it is being replaced by one with a socket of its own
  if (errno == EACCES) {
    return NoService(socket_path_, strerror(EACCES),
                     "this user may not connect: see --socket_mode and --socket_group of the service, and the modes of "
                     "the folders above the socket");
  }
  return NoService(socket_path_, strerror(errno));
}

absl::Status Connection::Call(Deadline deadline, const Try& call) const {
  Attempts attempts(*this, deadline);
  while (true) {
    RETURN_IF_ERROR(attempts.Begin());
    absl::Status status = Once(deadline, call);
    if (status.ok() || !attempts.ShallTryAgain(status)) return status;
  }
}

absl::Status Connection::CallOnce(Deadline deadline, const Try& call) const {
  RETURN_IF_ERROR(Reach(deadline));
  return Once(deadline, call);
}

absl::Status Connection::Once(Deadline deadline, const Try& call) const {
  grpc::ClientContext context;
  context.set_deadline(deadline);
  return ToStatus(call(context));
}

void Connection::WaitForChange(Deadline deadline) const {
  const grpc_connectivity_state state = channel_->GetState(/*try_to_connect=*/false);
  if (state == GRPC_CHANNEL_READY) channel_->WaitForStateChange(state, deadline);
}

absl::Status Connection::ToStatus(const grpc::Status& status) const {
  if (status.ok()) return absl::OkStatus();
  if (IsTransportFailure(status)) return NoService(socket_path_, status.error_message());
  return FromGrpc(status);
}

absl::Status Attempts::Begin() const { return connection_.Reach(Sooner(deadline_, DeadlineIn(kMaxAbsence))); }

bool Attempts::ShallTryAgain(const absl::Status& status) {
  if (HasReason(status, Reason::kDraining)) return ShallOutwaitADrain();
  // A ticket dies with the broker that gave it, and the next broker cannot know it.
  const bool lost = HasReason(status, Reason::kServiceUnavailable) || HasReason(status, Reason::kTicketInvalid);
  return lost && ShallFollowALostOne();
}

// It will have gone in a moment, and the next one answers on the same socket.
bool Attempts::ShallOutwaitADrain() {
  constexpr milliseconds kInterval(50);
  if (!drained_by_.has_value()) drained_by_ = Sooner(deadline_, DeadlineIn(kMaxAbsence));
  connection_.WaitForChange(Sooner(*drained_by_, DeadlineIn(kInterval)));
  return Remaining(*drained_by_).count() > 0;
}

bool Attempts::ShallFollowALostOne() {
  // Kills may follow each other closely; but a call that ends every broker that it comes to must not go on.
  constexpr int kMaxLost = 4;
  // A call can fail before the channel has noticed that its connection is gone, and the next one would be put on the
  // same dead connection.
  constexpr milliseconds kTimeToNotice(200);
  constexpr milliseconds kPause(10);  // before the third try, then doubled
  if (++lost_ > kMaxLost) return false;
  connection_.WaitForChange(Sooner(deadline_, DeadlineIn(kTimeToNotice)));
  if (lost_ > 1) std::this_thread::sleep_for(std::min(kPause * (1 << (lost_ - 2)), Remaining(deadline_)));
  return Remaining(deadline_).count() > 0;
}

// The service never cancels a call by itself, and this library does not ask for what it has cancelled: such a call was
// cut off by the end of its broker.
bool IsTransportFailure(const grpc::Status& status) {
  const grpc::StatusCode code = status.error_code();
  return (code == grpc::StatusCode::UNAVAILABLE || code == grpc::StatusCode::CANCELLED) &&
         status.error_details().empty();
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  if (!status.error_details().empty()) {
    absl::Status parsed = ParseRpcStatus(status.error_details());
    const bool same_error = static_cast<int>(parsed.code()) == static_cast<int>(status.error_code());
    if (same_error && !GetErrorDetails(parsed).reason.empty()) return parsed;
  }
  const int code = static_cast<int>(status.error_code());
  // gRPC says nothing of what it could not decode, a name that is not UTF-8 for instance.
  const std::string message =
      !status.error_message().empty()
          ? status.error_message()
          : absl::StrCat("the call failed with gRPC's code ", code, " and without a message: is every name UTF-8?");
  const absl::Status ours = MakeError(ReasonFor(status.error_code()), message, {{"grpc_code", absl::StrCat(code)}});
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), message);
  result.SetPayload(kErrorInfoTypeUrl, *ours.GetPayload(kErrorInfoTypeUrl));
  return result;
}

}  // namespace weightbroker::client
