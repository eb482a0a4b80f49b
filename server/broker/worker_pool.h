// A few threads for work that blocks (reading model folders), so that gRPC's own never do. What waits is bounded:
// beyond that a caller is refused at once rather than served late.
//
//   if (!pool.TrySubmit([call] { call->Run(); })) return TooManyRequests();
//
// Thread-safe.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "common/base/mutex.h"

namespace weightbroker {

class WorkerPool {
 public:
  // Ends the process, with a log line, if there are no threads to be had: then nothing can be served.
  WorkerPool(int threads, size_t max_waiting);
  ~WorkerPool();  // stops
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Hands over `work` unless `max_waiting` pieces of work wait already, or the pool has been stopped.
  bool TrySubmit(std::function<void()> work);

  // Does what waits, then ends the threads.
  void Stop();

 private:
  void Work();

  const size_t max_waiting_;
  std::vector<std::thread> threads_;

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> waiting_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace weightbroker
