#include "server/broker/stream_watch.h"

#include <algorithm>
#include <utility>

#include "common/base/thread.h"

namespace weightbroker {

StreamWatch::StreamWatch(std::chrono::milliseconds limit, std::function<void()> on_cut,
                         std::chrono::milliseconds interval)
    : limit_(limit), interval_(interval), on_cut_(std::move(on_cut)) {
  thread_ = StartThreadOrExit("slow readers", [this] { Run(); });
}

StreamWatch::~StreamWatch() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    stopped_.NotifyAll();
  }
  thread_.join();
}

void StreamWatch::Add(const std::shared_ptr<WatchedStream>& stream) {
  MutexLock lock(mutex_);
  streams_.push_back(stream);
}

void StreamWatch::Run() {
  while (true) {
    std::vector<std::shared_ptr<WatchedStream>> streams;
    {
      const auto next = std::chrono::steady_clock::now() + interval_;
      MutexLock lock(mutex_);
      while (!stopping_ && std::chrono::steady_clock::now() < next) stopped_.WaitUntil(mutex_, next);
      if (stopping_) return;
      streams = Living();
    }
    const auto now = std::chrono::steady_clock::now();
    for (const auto& stream : streams) {
      if (stream->CutIfStuck(now, limit_)) on_cut_();
    }
  }
}

std::vector<std::shared_ptr<WatchedStream>> StreamWatch::Living() {
  std::vector<std::shared_ptr<WatchedStream>> living;
  std::erase_if(streams_, [&living](const std::weak_ptr<WatchedStream>& weak) {
    auto stream = weak.lock();
    if (stream == nullptr) return true;
    living.push_back(std::move(stream));
    return false;
  });
  return living;
}

}  // namespace weightbroker
