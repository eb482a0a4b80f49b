// Waits for descriptors and times, and calls back, in one thread.
//
//   EventLoop loop;
//   loop.WatchReadable(child.pidfd(), [&] { loop.Quit(); });
//   loop.CallAfter(std::chrono::seconds(10), [&] { child.Kill(SIGKILL); });
//   loop.Run();                                             // until Quit
//
// Not thread-safe. Callbacks may watch, unwatch, call later and quit.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <utility>

namespace weightbroker {

class EventLoop {
 public:
  using Callback = std::function<void()>;
  using Clock = std::chrono::steady_clock;

  // Calls `callback` whenever `fd` is readable, has an error or was hung up. The descriptor stays the caller's and must
  // stay open until Unwatch. One callback a descriptor: the last one given.
  void WatchReadable(int fd, Callback callback);
  void Unwatch(int fd);

  // Calls `callback` once, after `delay` or later.
  void CallAfter(std::chrono::milliseconds delay, Callback callback);

  // Serves until Quit is called; at once if it was called before.
  void Run();
  void Quit() { quit_ = true; }

 private:
  int TimeToNextCall() const;
  void CallDue();
  void ServeReady();

  std::map<int, Callback> watched_;
  std::multimap<Clock::time_point, Callback> calls_;
  bool quit_ = false;
};

}  // namespace weightbroker
