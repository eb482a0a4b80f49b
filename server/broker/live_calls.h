// Counts the calls that are under way, so that a broker which ends knows when the last is over: gRPC's own Shutdown
// waits for idle connections, too, whose clients may not look at them for seconds.
//
//   LiveCalls::Hold hold = live_calls.Begin();       // until it goes
//   ...
//   live_calls.WaitUntilNone(std::chrono::seconds(2));
//
// Thread-safe.
#pragma once

#include <chrono>
#include <utility>

#include "common/base/mutex.h"

namespace weightbroker {

class LiveCalls {
 public:
  // Move-only. The counter must outlive it.
  class Hold {
   public:
    explicit Hold(LiveCalls* calls) : calls_(calls) {}
    Hold(Hold&& other) noexcept : calls_(std::exchange(other.calls_, nullptr)) {}
    Hold& operator=(Hold&&) = delete;
    ~Hold() {
      if (calls_ != nullptr) calls_->End();
    }

   private:
    LiveCalls* calls_;
  };

  Hold Begin() {
    MutexLock lock(mutex_);
    ++count_;
    return Hold(this);
  }

  // False if `timeout` was not enough.
  bool WaitUntilNone(std::chrono::milliseconds timeout) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    MutexLock lock(mutex_);
    while (count_ > 0) {
      if (!changed_.WaitUntil(mutex_, deadline)) return count_ == 0;
    }
    return true;
  }

 private:
  void End() {
    MutexLock lock(mutex_);
    if (--count_ == 0) changed_.NotifyAll();
  }

  Mutex mutex_;
  CondVar changed_;
  int count_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace weightbroker
