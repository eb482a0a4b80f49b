// Keeps the engine's signals off threads that it does not know of: a thread inherits the mask of its maker.
//
//   const BlockSignals block;
//   watcher_ = std::thread(...);
#pragma once

#include <signal.h>

namespace weightbroker::client {

// In the calling thread, while it lives.
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockSignals(const BlockSignals&) = delete;
  BlockSignals& operator=(const BlockSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace weightbroker::client
