// How much of the service one user may take up at once, so that one that goes astray leaves room for the others: calls
// under way, those of every connection of that user together.
//
//   const ClientLimits::Hold hold = limits.Begin(peer.uid);
//   RETURN_IF_ERROR(hold.status());                          // TOO_MANY_REQUESTS, naming the flag
//
// Thread-safe.
#pragma once

#include <sys/types.h>

#include <map>
#include <utility>

#include "absl/status/status.h"
#include "common/base/mutex.h"

namespace weightbroker {

class ClientLimits {
 public:
  // A call that counts for as long as it lives. Move-only; the limits must outlive it.
  class Hold {
   public:
    Hold() = default;
    Hold(ClientLimits* limits, uid_t uid, absl::Status status)
        : limits_(limits), uid_(uid), status_(std::move(status)) {}
    Hold(Hold&& other) noexcept
        : limits_(std::exchange(other.limits_, nullptr)), uid_(other.uid_), status_(std::move(other.status_)) {}
    Hold& operator=(Hold&&) = delete;
    ~Hold() {
      if (limits_ != nullptr) limits_->End(uid_);
    }

    const absl::Status& status() const { return status_; }

   private:
    ClientLimits* limits_ = nullptr;
    uid_t uid_ = 0;
    absl::Status status_;
  };

  // `max_calls` is for each user; 0: no limit.
  explicit ClientLimits(int max_calls) : max_calls_(max_calls) {}

  Hold Begin(uid_t uid);

  // Of one user, now.
  int CountCalls(uid_t uid) const;

 private:
  void End(uid_t uid);

  const int max_calls_;

  mutable Mutex mutex_;
  std::map<uid_t, int> calls_ ABSL_GUARDED_BY(mutex_);  // users with any
};

}  // namespace weightbroker
