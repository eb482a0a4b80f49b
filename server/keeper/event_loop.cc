#include "server/keeper/event_loop.h"

#include <poll.h>

#include <algorithm>
#include <climits>
#include <vector>

namespace weightbroker {

void EventLoop::WatchReadable(int fd, Callback callback) { watched_[fd] = std::move(callback); }

void EventLoop::Unwatch(int fd) { watched_.erase(fd); }

void EventLoop::CallAfter(std::chrono::milliseconds delay, Callback callback) {
  calls_.emplace(Clock::now() + delay, std::move(callback));
}

void EventLoop::Run() {
  while (!quit_) {
    ServeReady();
    CallDue();
  }
  quit_ = false;
}

int EventLoop::TimeToNextCall() const {
  if (calls_.empty()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(calls_.begin()->first - Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, INT_MAX));
}

void EventLoop::CallDue() {
  const auto now = Clock::now();
  while (!quit_ && !calls_.empty() && calls_.begin()->first <= now) {
    const Callback callback = std::move(calls_.begin()->second);
    calls_.erase(calls_.begin());
    callback();
  }
}

void EventLoop::ServeReady() {
  std::vector<pollfd> fds;
  for (const auto& [fd, callback] : watched_) fds.push_back({.fd = fd, .events = POLLIN, .revents = 0});
  if (poll(fds.data(), fds.size(), TimeToNextCall()) <= 0) return;
  for (const pollfd& ready : fds) {
    if (quit_ || ready.revents == 0) continue;
    const auto it = watched_.find(ready.fd);
    if (it == watched_.end()) continue;    // unwatched by the callback before
    const Callback callback = it->second;  // may unwatch itself
    callback();
  }
}

}  // namespace weightbroker
