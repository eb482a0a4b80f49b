#include "server/keeper/supervisor.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace weightbroker {
namespace {

using std::chrono::milliseconds;

int64_t MillisecondsBetween(Supervisor::TimePoint begin, Supervisor::TimePoint end) {
  return std::chrono::duration_cast<milliseconds>(end - begin).count();
}

}  // namespace

SupervisorAction Supervisor::Next(TimePoint now) const {
  if (state_.phase == Phase::kDown && may_start_ && now >= state_.start_at) return SupervisorAction::kStart;
  if (const auto kill_at = KillAt(); kill_at.has_value() && now >= *kill_at) return SupervisorAction::kKill;
  if (state_.phase == Phase::kReady && !state_.ping_sent.has_value() && now >= state_.next_ping) {
    return SupervisorAction::kPing;
  }
  return SupervisorAction::kNothing;
}

std::optional<Supervisor::TimePoint> Supervisor::deadline() const {
  if (state_.phase == Phase::kDown) return may_start_ ? std::optional(state_.start_at) : std::nullopt;
  if (state_.phase == Phase::kReady && !state_.ping_sent.has_value()) return state_.next_ping;
  return KillAt();
}

std::optional<Supervisor::TimePoint> Supervisor::KillAt() const {
  if (state_.phase == Phase::kStarting && timing_.start_timeout > milliseconds(0)) {
    return state_.since + timing_.start_timeout;
  }
  if (state_.phase == Phase::kReady && state_.ping_sent.has_value() && timing_.ping_timeout > milliseconds(0)) {
    return *state_.ping_sent + timing_.ping_timeout;
  }
  return std::nullopt;
}

std::string Supervisor::KillCause(TimePoint now) const {
  if (state_.phase == Phase::kStarting) {
    return absl::StrCat("it was not ready after ", MillisecondsBetween(state_.since, now), " ms");
  }
  return absl::StrCat("it has not answered a ping for ", MillisecondsBetween(state_.ping_sent.value_or(now), now),
                      " ms");
}

void Supervisor::OnStarted(TimePoint now) {
  state_.phase = Phase::kStarting;
  state_.since = now;
  state_.ping_sent.reset();
}

void Supervisor::OnEnded(TimePoint now) {
  if (state_.phase == Phase::kStarting || state_.phase == Phase::kDown) LengthenBackoff();
  state_.start_at = now + state_.backoff;
  state_.phase = Phase::kDown;
  state_.since = now;
  state_.ping_sent.reset();
}

void Supervisor::OnReady(TimePoint now) {
  if (state_.phase != Phase::kStarting) return;
  state_.phase = Phase::kReady;
  state_.since = now;
  state_.next_ping = now + timing_.ping_interval;
  state_.backoff = milliseconds(0);
  state_.ever_ready = true;
}

int64_t Supervisor::OnPing(TimePoint now) {
  state_.ping_sent = now;
  state_.next_ping = now + timing_.ping_interval;
  return ++state_.last_ping;
}

void Supervisor::OnPong(int64_t number) {
  if (number == state_.last_ping) state_.ping_sent.reset();
}

void Supervisor::OnKilled(TimePoint now) {
  if (state_.phase == Phase::kStarting) LengthenBackoff();
  state_.phase = Phase::kKilled;
  state_.since = now;
  state_.ping_sent.reset();
}

void Supervisor::LengthenBackoff() {
  state_.backoff = std::clamp(2 * state_.backoff, timing_.min_backoff, timing_.max_backoff);
}

milliseconds Supervisor::UntilStart(TimePoint now) const {
  return std::max(std::chrono::ceil<milliseconds>(state_.start_at - now), milliseconds(0));
}

}  // namespace weightbroker
