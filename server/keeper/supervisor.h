// Decides when a broker is started, asked whether it is alive, and killed. It has no effects: the keeper tells it what
// has happened and does what it says.
//
//   switch (supervisor.Next(now)) {
//     case SupervisorAction::kStart: ...; supervisor.OnStarted(now); break;
//     case SupervisorAction::kPing: connection.Send({.type = kPing, .request_id = supervisor.OnPing(now)}); break;
//     case SupervisorAction::kKill: ...; supervisor.OnKilled(); break;
//     case SupervisorAction::kNothing: break;     // until deadline()
//   }
//
// A broker that had become ready is replaced at once, because engines wait for it; one that dies before that is tried
// again after a pause that doubles, because it would most likely die again. Not thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace weightbroker {

struct SupervisorTiming {
  std::chrono::milliseconds min_backoff{20};
  std::chrono::milliseconds max_backoff{5'000};
  std::chrono::milliseconds ping_interval{1'000};
  std::chrono::milliseconds ping_timeout{5'000};    // 0: never kill for it
  std::chrono::milliseconds start_timeout{30'000};  // until ready; 0: never kill for it
};

enum class SupervisorAction { kNothing, kStart, kPing, kKill };

class Supervisor {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  // down → starting → ready → killed → down; starting → killed; any → down (it ended by itself)
  enum class Phase { kDown, kStarting, kReady, kKilled };

  // Everything that a keeper which replaces this one by execve must know.
  struct State {
    Phase phase = Phase::kDown;
    TimePoint since;     // when the phase began
    TimePoint start_at;  // kDown: when to start the next
    std::chrono::milliseconds backoff{0};
    TimePoint next_ping;                 // kReady
    int64_t last_ping = 0;               // its number
    std::optional<TimePoint> ping_sent;  // of one that is not answered yet
    bool ever_ready = false;
  };

  Supervisor(SupervisorTiming timing, State state) : timing_(timing), state_(state) {}

  // The keeper starts no broker of its own, or starts no more.
  void set_may_start(bool may_start) { may_start_ = may_start; }

  SupervisorAction Next(TimePoint now) const;
  // When Next may have another answer though nothing happens.
  std::optional<TimePoint> deadline() const;
  // Why Next says kKill.
  std::string KillCause(TimePoint now) const;

  void OnStarted(TimePoint now);
  // It could not be started, or has ended.
  void OnEnded(TimePoint now);
  // Does nothing if it is ready already, or killed.
  void OnReady(TimePoint now);
  // Returns the number to send.
  int64_t OnPing(TimePoint now);
  void OnPong(int64_t number);
  void OnKilled(TimePoint now);

  Phase phase() const { return state_.phase; }
  bool ever_ready() const { return state_.ever_ready; }
  std::chrono::milliseconds UntilStart(TimePoint now) const;
  const State& state() const { return state_; }

 private:
  std::optional<TimePoint> KillAt() const;
  // For one that ends before it is ready.
  void LengthenBackoff();

  const SupervisorTiming timing_;
  State state_;
  bool may_start_ = true;
};

}  // namespace weightbroker
