// How a loader has ended, which the keeper says when it has reaped it. Each loader has one of its own, so that what is
// said of one is never taken for another's that has got its process id. Thread-safe.
#pragma once

#include <chrono>
#include <optional>

#include "common/base/mutex.h"

namespace weightbroker {

class LoaderEnd {
 public:
  // `wait_status` is as waitpid gives it.
  void Set(int wait_status) {
    MutexLock lock(mutex_);
    wait_status_ = wait_status;
    changed_.NotifyAll();
  }

  // Nobody is going to say it any more: the keeper has gone.
  void Lose() {
    MutexLock lock(mutex_);
    lost_ = true;
    changed_.NotifyAll();
  }

  // Nothing if it is not known within `timeout`, and at once if it never will be.
  std::optional<int> Wait(std::chrono::milliseconds timeout) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    MutexLock lock(mutex_);
    while (!wait_status_.has_value() && !lost_ && std::chrono::steady_clock::now() < deadline) {
      changed_.WaitUntil(mutex_, deadline);
    }
    return wait_status_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::optional<int> wait_status_ ABSL_GUARDED_BY(mutex_);
  bool lost_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace weightbroker
