// A seat in a group's page with the thread that it belongs to, driven step by step, by a clock that the test sets.
//
//   FakeTime time;
//   Sitter first(&page, &time), second(&page, &time);
//   EXPECT_EQ(first.Turn().role, MemberRole::kActive);
//   first.Die();                                           // as the kernel tells it: the thread ends
#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/mutex.h"
#include "common/group/page.h"
#include "common/group/seat.h"

namespace weightbroker::group {

inline constexpr int64_t kMillisecond = 1'000'000;

class FakeTime {
 public:
  void Pass(int64_t nanoseconds) { now_ += nanoseconds; }
  int64_t now() const { return now_; }
  GroupSeat::Clock clock() {
    return [this] { return now_.load(); };
  }

 private:
  std::atomic<int64_t> now_{1'000'000'000'000};
};

inline UniqueFd NewPage(uint64_t first_epoch = 100, std::chrono::nanoseconds timeout = kDefaultTimeout) {
  auto fd =
      CreateGroupPage({.fingerprint = std::string(64, 'a'), .heartbeat_timeout = timeout, .first_epoch = first_epoch});
  if (!fd.ok()) abort();
  return *std::move(fd);
}

inline GroupPage MapPage(const UniqueFd& fd) {
  auto page = GroupPage::Map(fd.get());
  if (!page.ok()) abort();
  return *std::move(page);
}

class Sitter {
 public:
  struct Outcome {
    absl::Status status;
    MemberRole role = MemberRole::kStandby;
    uint64_t epoch = 0;
    int64_t due_in = 0;  // nanoseconds from the turn
  };

  Sitter(const GroupPage* page, FakeTime* time) : time_(time), thread_([this] { Run(); }) {
    Do([&] {
      auto seat = GroupSeat::Take(page, time_->clock());
      status_ = seat.status();
      if (seat.ok()) seat_ = *std::move(seat);
    });
  }
  ~Sitter() { Leave(); }

  const absl::Status& taken() const { return status_; }

  Outcome Turn(std::optional<int64_t> beat_ns = std::nullopt) {
    Outcome outcome;
    Do([&] {
      const auto due = seat_->Turn(beat_ns);
      outcome = {due.status(), seat_->role(), seat_->term().epoch(), due.value_or(0) - time_->now()};
    });
    return outcome;
  }

  void StepDown() {
    Do([&] { seat_->StepDown(); });
  }
  void Rejoin() {
    Do([&] { seat_->Rejoin(); });
  }
  void Wait(int64_t until_ns) {
    Do([&] { seat_->Wait(until_ns); });
  }
  void Wake() { seat_->Wake(); }
  uint32_t index() const { return seat_->index(); }

  void Leave() {
    if (!thread_.joinable()) return;
    Do([&] { seat_ = nullptr; });
    End();
  }

  // Its memory stays, as that of a process would until after the kernel has told.
  void Die() {
    Do([&] {
      static auto* const remains = new std::vector<std::unique_ptr<GroupSeat>>;
      static auto* const mutex = new Mutex;
      const MutexLock lock(*mutex);
      remains->push_back(std::move(seat_));
    });
    End();
  }

 private:
  void Do(const std::function<void()>& step) {
    std::promise<void> done;
    {
      const MutexLock lock(mutex_);
      step_ = [&] {
        step();
        done.set_value();
      };
      changed_.NotifyAll();
    }
    done.get_future().wait();
  }

  void End() {
    {
      const MutexLock lock(mutex_);
      ending_ = true;
      changed_.NotifyAll();
    }
    thread_.join();
  }

  void Run() {
    while (true) {
      std::function<void()> step;
      {
        const MutexLock lock(mutex_);
        while (!ending_ && !step_) changed_.Wait(mutex_);
        if (ending_) return;
        step = std::exchange(step_, nullptr);
      }
      step();
    }
  }

  FakeTime* const time_;
  absl::Status status_;
  std::unique_ptr<GroupSeat> seat_;
  Mutex mutex_;
  CondVar changed_;
  std::function<void()> step_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace weightbroker::group
