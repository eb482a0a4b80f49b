#include "server/broker/audit.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/mutex.h"
#include "common/base/quote.h"

namespace weightbroker {
namespace {

constexpr int kRefusalsPerSecond = 20;

// How many lines of refusals were left out before one that may be written; nothing if this one may not.
class RefusalRate {
 public:
  std::optional<int64_t> Take() {
    const auto now = std::chrono::steady_clock::now();
    MutexLock lock(mutex_);
    if (now - second_ >= std::chrono::seconds(1)) {
      second_ = now;
      lines_ = 0;
    }
    if (lines_ >= kRefusalsPerSecond) {
      ++left_out_;
      return std::nullopt;
    }
    ++lines_;
    return std::exchange(left_out_, 0);
  }

 private:
  Mutex mutex_;
  std::chrono::steady_clock::time_point second_ ABSL_GUARDED_BY(mutex_);
  int lines_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace

std::optional<int64_t> TakeRefusalTurn() {
  static RefusalRate* const rate = new RefusalRate();
  return rate->Take();
}

void Audit(const AuditEvent& event, int64_t refusals_left_out) {
  LogFields fields = {{"method", std::string(event.method)}};
  if (event.peer.has_value()) {
    fields.emplace_back("uid", absl::StrCat(event.peer->uid));
    fields.emplace_back("gid", absl::StrCat(event.peer->gid));
    fields.emplace_back("peer_pid", absl::StrCat(event.peer->pid));
    if (event.peer->details != nullptr) fields.emplace_back("peer_program", Printable(event.peer->details->program));
  }
  if (!event.object.empty()) fields.emplace_back("object", Printable(event.object));
  const std::string reason = GetErrorDetails(event.outcome).reason;
  fields.emplace_back("outcome", event.outcome.ok() ? "ok" : reason.empty() ? "failed" : reason);
  if (refusals_left_out > 0) fields.emplace_back("refusals_left_out", absl::StrCat(refusals_left_out));
  Log(event.outcome.ok() ? LogLevel::kInfo : LogLevel::kWarning, "audit", fields);
}

}  // namespace weightbroker
