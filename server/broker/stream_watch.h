// Cuts off streams whose callers do not read what is sent to them: each holds a call, and memory in gRPC, for as long
// as it likes otherwise. Looks once a second.
//
//   StreamWatch watch(std::chrono::seconds(30), [](const std::string& method) { ... });
//   watch.Add(call);                                   // a weak hold
//
// Runs one thread. Thread-safe.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "common/base/mutex.h"

namespace weightbroker {

// A stream as far as the watch goes.
class WatchedStream {
 public:
  virtual ~WatchedStream() = default;

  // Ends the call if one message has been on its way for longer than `limit`; whether it did. Thread-safe.
  virtual bool CutIfStuck(std::chrono::steady_clock::time_point now, std::chrono::milliseconds limit) = 0;
};

class StreamWatch {
 public:
  // `on_cut` is called from the watch's thread for each stream that is cut off.
  StreamWatch(std::chrono::milliseconds limit, std::function<void()> on_cut,
              std::chrono::milliseconds interval = std::chrono::milliseconds(1000));
  ~StreamWatch();
  StreamWatch(const StreamWatch&) = delete;
  StreamWatch& operator=(const StreamWatch&) = delete;

  void Add(const std::shared_ptr<WatchedStream>& stream);

 private:
  void Run();
  std::vector<std::shared_ptr<WatchedStream>> Living() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::chrono::milliseconds limit_;
  const std::chrono::milliseconds interval_;
  const std::function<void()> on_cut_;

  Mutex mutex_;
  CondVar stopped_;
  std::vector<std::weak_ptr<WatchedStream>> streams_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace weightbroker
