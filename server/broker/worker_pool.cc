#include "server/broker/worker_pool.h"

#include <utility>

#include "common/base/thread.h"

namespace weightbroker {

WorkerPool::WorkerPool(int threads, size_t max_waiting) : max_waiting_(max_waiting) {
  for (int i = 0; i < threads; ++i) threads_.push_back(StartThreadOrExit("the calls that block", [this] { Work(); }));
}

WorkerPool::~WorkerPool() { Stop(); }

bool WorkerPool::TrySubmit(std::function<void()> work) {
  MutexLock lock(mutex_);
  if (stopped_ || waiting_.size() >= max_waiting_) return false;
  waiting_.push_back(std::move(work));
  changed_.NotifyOne();
  return true;
}

void WorkerPool::Stop() {
  {
    MutexLock lock(mutex_);
    stopped_ = true;
    changed_.NotifyAll();
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void WorkerPool::Work() {
  while (true) {
    std::function<void()> work;
    {
      MutexLock lock(mutex_);
      while (waiting_.empty() && !stopped_) changed_.Wait(mutex_);
      if (waiting_.empty()) return;
      work = std::move(waiting_.front());
      waiting_.pop_front();
    }
    work();
  }
}

}  // namespace weightbroker
