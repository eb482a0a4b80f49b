#include "client/src/lease.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/block_signals.h"
#include "client/src/status_conversion.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/thread.h"

namespace weightbroker::client {
namespace {

using std::chrono::milliseconds;

v1::ExportRequest RenewalOf(const v1::ExportHeader& header, const std::string& alias) {
  v1::ExportRequest request;
  request.set_fingerprint(header.fingerprint());
  request.set_rank(header.rank());
  request.set_hold(true);
  request.mutable_renewal()->set_generation(header.generation());
  *request.mutable_renewal()->mutable_resident_time() = header.resident_time();
  request.mutable_renewal()->set_alias(alias);
  return request;
}

// Whether a broker that is about to end, busy or not there could be followed by one that renews the lease.
bool MayPass(const absl::Status& status) {
  return HasReason(status, Reason::kServiceUnavailable) || HasReason(status, Reason::kDraining) ||
         HasReason(status, Reason::kDeadlineExceeded) || HasReason(status, Reason::kTooManyRequests);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Lease>> Lease::Start(std::shared_ptr<const Connection> connection,
                                                    std::unique_ptr<ExportStream> stream,
                                                    const v1::ExportHeader& header, LeaseOptions options) {
  std::unique_ptr<Lease> lease(new Lease(std::move(connection), std::move(stream), header, std::move(options)));
  const BlockSignals block;
  ASSIGN_OR_RETURN(lease->watcher_, StartThread("watching a lease", [watched = lease.get()] { watched->Watch(); }));
  return lease;
}

Lease::Lease(std::shared_ptr<const Connection> connection, std::unique_ptr<ExportStream> stream,
             const v1::ExportHeader& header, LeaseOptions options)
    : connection_(std::move(connection)),
      options_(std::move(options)),
      renewal_(RenewalOf(header, options_.alias)),
      stream_(std::move(stream)) {}

Lease::~Lease() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    stream_->Cancel();
    stopped_.NotifyAll();
  }
  if (watcher_.joinable()) watcher_.join();
}

bool Lease::lost() const {
  const MutexLock lock(mutex_);
  return lost_;
}

absl::Status Lease::status() const {
  const MutexLock lock(mutex_);
  return status_;
}

bool Lease::stopping() const {
  const MutexLock lock(mutex_);
  return stopping_;
}

void Lease::Watch() {
  while (true) {
    const absl::Status why = ReadToTheEnd();
    if (stopping()) return;
    Move(LeaseEvent::Kind::kInterrupted, why);
    const absl::Status renewed = Renew();
    if (stopping()) return;
    if (!renewed.ok()) {
      // What the service has said of the set says more than that it does not know it any more.
      const bool drained = HasReason(why, Reason::kDraining) || HasReason(why, Reason::kQuarantined);
      return Move(LeaseEvent::Kind::kLost, drained ? why : renewed);
    }
    Move(LeaseEvent::Kind::kRenewed, absl::OkStatus());
  }
}

// Follows the stream, and gives why it ended.
absl::Status Lease::ReadToTheEnd() {
  ExportStream* const stream = Replace(nullptr);
  while (true) {
    const auto message = stream->Read(gpr_inf_future(GPR_CLOCK_MONOTONIC));
    if (!message.ok() || !message->has_value()) break;
    TakeEvent(**message);
  }
  absl::Status announced = status();
  // A stream that ends well after the service has said that it drains ends for the reason given then.
  if (stream->end_status().ok()) {
    return announced.ok() ? MakeError(Reason::kDraining, "the service ended the lease") : announced;
  }
  if (!IsTransportFailure(stream->end_status())) return FromGrpc(stream->end_status());
  return MakeError(Reason::kServiceUnavailable, "the connection to the service broke, and the lease with it",
                   {{"cause", stream->end_status().error_message()}});
}

void Lease::TakeEvent(const RawMessage& message) {
  v1::ExportResponse response;
  const std::string_view bytes = message.bytes();
  if (!response.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
  if (response.event().kind() == v1::ExportEvent::KIND_SUPERSEDED) return TellSuperseded(response.event());
  if (response.event().kind() == v1::ExportEvent::KIND_QUARANTINED) {
    Move(LeaseEvent::Kind::kQuarantined,
         MakeError(Reason::kQuarantined,
                   absl::StrCat("the service has put these weights in quarantine: ", response.event().message()),
                   {{"fingerprint", renewal_.fingerprint()}}));
    return;
  }
  if (response.event().kind() != v1::ExportEvent::KIND_DRAINING) return;  // an event that a later version knows
  Move(LeaseEvent::Kind::kDraining, MakeError(Reason::kDraining, absl::StrCat("the service takes the weight set down: ",
                                                                              response.event().message())));
}

// The lease is what it was.
void Lease::TellSuperseded(const v1::ExportEvent& event) {
  if (!options_.on_event) return;
  LeaseEvent told;
  told.kind = LeaseEvent::Kind::kSuperseded;
  told.alias = event.alias();
  told.fingerprint = event.fingerprint();
  options_.on_event(told);
}

void Lease::ReportDamage(const std::string& tensor) const {
  constexpr milliseconds kPatience(2000);
  v1::ReportDamageRequest request;
  request.set_fingerprint(renewal_.fingerprint());
  request.set_generation(renewal_.renewal().generation());
  request.set_rank(renewal_.rank());
  request.set_tensor(tensor);
  v1::ReportDamageResponse response;
  connection_
      ->Call(DeadlineIn(kPatience),
             [&](grpc::ClientContext& context) {
               return connection_->service().ReportDamage(&context, request, &response);
             })
      .IgnoreError();
}

// Asks until it is answered, for as long as a service may stay away.
absl::Status Lease::Renew() {
  constexpr milliseconds kFirstPause(10);
  constexpr milliseconds kLongestPause(1000);
  if (options_.renewal_deadline.count() <= 0) return status();
  const Deadline deadline = DeadlineIn(options_.renewal_deadline);
  milliseconds pause = kFirstPause;
  while (Remaining(deadline).count() > 0) {
    absl::Status answer = TryRenew(deadline);
    if (answer.ok() || !MayPass(answer)) return answer;
    if (!Pause(std::min(pause, Remaining(deadline)))) return answer;
    pause = std::min(2 * pause, kLongestPause);
  }
  return MakeError(Reason::kServiceUnavailable,
                   absl::StrCat("the connection to the service broke, and no service has renewed the lease at ",
                                connection_->socket_path(), " within ", options_.renewal_deadline.count(), " ms"),
                   {{"socket", connection_->socket_path()}});
}

absl::Status Lease::TryRenew(Deadline deadline) {
  ExportStream* const stream =
      Replace(std::make_unique<ExportStream>(connection_->channel(), renewal_, ExportStream::Start::kOnceReachable));
  ASSIGN_OR_RETURN(const auto message, stream->Read(deadline));
  if (!message.has_value()) {
    absl::Status status = connection_->ToStatus(stream->end_status());
    return status.ok() ? MakeError(Reason::kDraining, "the service ended the lease") : status;
  }
  v1::ExportResponse response;
  const std::string_view bytes = message->bytes();
  // A service that does not know renewals answers as to any other Export.
  const bool renewed = response.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())) &&
                       response.header().generation() == renewal_.renewal().generation() &&
                       response.header().ticket().empty();
  if (renewed) return absl::OkStatus();
  return MakeError(Reason::kProtocolError, "the service did not answer the renewal of a lease as one",
                   {{"fingerprint", renewal_.fingerprint()}});
}

// The stream to read from now on: `stream`, if there is one.
ExportStream* Lease::Replace(std::unique_ptr<ExportStream> stream) {
  // Whatever was there before is destroyed without the lock: that waits for its end.
  const MutexLock lock(mutex_);
  if (stream != nullptr) {
    stream_.swap(stream);
    if (stopping_) stream_->Cancel();
  }
  return stream_.get();
}

// False if the lease is being ended.
bool Lease::Pause(milliseconds time) {
  const auto until = std::chrono::steady_clock::now() + time;
  const MutexLock lock(mutex_);
  while (!stopping_ && stopped_.WaitUntil(mutex_, until)) {
  }
  return !stopping_;
}

void Lease::Move(LeaseEvent::Kind kind, absl::Status status) {
  const LeaseEvent event = {kind, ToPublic(status)};
  {
    const MutexLock lock(mutex_);
    status_ = std::move(status);
    lost_ = kind == LeaseEvent::Kind::kLost;
  }
  if (options_.on_event) options_.on_event(event);
}

}  // namespace weightbroker::client
