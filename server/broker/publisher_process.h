// The process that has published a shard in GPU memory: for as long as it runs it may still write there, because nobody
// can take a mapping of GPU memory away from it. Shared and asked, never told.
//
//   auto publisher = std::make_shared<const PublisherProcess>(PublisherProcess::Find(peer.pid));
//   if (publisher->may_run()) ...                                  // at this moment, as far as can be seen
//
// Thread-safe. Move-only.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <utility>

#include "common/base/unique_fd.h"

namespace weightbroker {

class PublisherProcess {
 public:
  // The process that has this id now; 0 stands for one that this process cannot see, which is never seen to end.
  static PublisherProcess Find(pid_t pid);

  // The one that had it when it was written down, if that still runs: `start_ticks` tells it from a later one.
  static PublisherProcess Remember(pid_t pid, int64_t start_ticks);

  // Whether it has not exited yet, as far as can be seen.
  bool may_run() const;

  pid_t pid() const { return pid_; }
  int64_t start_ticks() const { return start_ticks_; }

 private:
  PublisherProcess(pid_t pid, int64_t start_ticks, UniqueFd pidfd, bool has_exited)
      : pid_(pid), start_ticks_(start_ticks), pidfd_(std::move(pidfd)), has_exited_(has_exited) {}

  pid_t pid_;
  int64_t start_ticks_;  // 0 if it is not known
  UniqueFd pidfd_;       // invalid if it has exited, or cannot be seen
  bool has_exited_;
};

}  // namespace weightbroker
