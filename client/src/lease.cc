#include "client/src/lease.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/block_signals.h"
#include "common/base/error.h"

namespace weightbroker::client {
namespace {

absl::Status WhyLost(const grpc::Status& end) {
  if (IsTransportFailure(end)) {
    return MakeError(Reason::kServiceUnavailable, "the connection to the service broke, and the lease with it",
                     {{"cause", end.error_message()}});
  }
  if (end.ok()) return MakeError(Reason::kDraining, "the service ended the lease");
  return FromGrpc(end);
}

}  // namespace

Lease::Lease(std::unique_ptr<ExportStream> stream) : stream_(std::move(stream)) {
  const BlockSignals block;
  watcher_ = std::thread([this] { Watch(); });
}

Lease::~Lease() {
  stream_->Cancel();
  watcher_.join();
}

bool Lease::lost() const {
  const MutexLock lock(mutex_);
  return lost_;
}

absl::Status Lease::status() const {
  const MutexLock lock(mutex_);
  return status_;
}

void Lease::Watch() {
  while (true) {
    const auto message = stream_->Read(gpr_inf_future(GPR_CLOCK_MONOTONIC));
    if (!message.ok() || !message->has_value()) break;
    TakeEvent(**message);
  }
  const MutexLock lock(mutex_);
  lost_ = true;
  // A stream that ends well after the service has said that it drains ends for the reason given then.
  if (status_.ok() || !stream_->end_status().ok()) status_ = WhyLost(stream_->end_status());
}

void Lease::TakeEvent(const RawMessage& message) {
  v1::ExportResponse response;
  const std::string_view bytes = message.bytes();
  if (!response.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
  if (response.event().kind() != v1::ExportEvent::KIND_DRAINING) return;  // an event that a later version knows
  const MutexLock lock(mutex_);
  status_ =
      MakeError(Reason::kDraining, absl::StrCat("the service takes the weight set down: ", response.event().message()));
}

}  // namespace weightbroker::client
