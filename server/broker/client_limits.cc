#include "server/broker/client_limits.h"

#include "absl/strings/str_cat.h"
#include "common/base/error.h"

namespace weightbroker {

ClientLimits::Hold ClientLimits::Begin(uid_t uid) {
  MutexLock lock(mutex_);
  int& calls = calls_[uid];
  if (max_calls_ > 0 && calls >= max_calls_) {
    return {nullptr, uid,
            MakeError(Reason::kTooManyRequests,
                      absl::StrCat("user ", uid, " has ", calls,
                                   " calls under way, the most that one user may (--max_calls_per_uid): try again when "
                                   "some have ended"),
                      {{"limit", "max_calls_per_uid"}, {"uid", absl::StrCat(uid)}, {"calls", absl::StrCat(calls)}})};
  }
  ++calls;
  return {this, uid, absl::OkStatus()};
}

int ClientLimits::CountCalls(uid_t uid) const {
  MutexLock lock(mutex_);
  const auto found = calls_.find(uid);
  return found == calls_.end() ? 0 : found->second;
}

void ClientLimits::End(uid_t uid) {
  MutexLock lock(mutex_);
  const auto found = calls_.find(uid);
  if (--found->second == 0) calls_.erase(found);
}

}  // namespace weightbroker
