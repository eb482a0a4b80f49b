#include "server/broker/machine_facts.h"

#include "absl/strings/str_cat.h"
#include "common/base/log.h"

namespace weightbroker {

std::optional<HealthFacts::Facts> MachineFacts::Get(std::chrono::milliseconds patience) {
  if (auto fresh = facts_->Fresh(); fresh.has_value()) return fresh;
  const auto deadline = std::chrono::steady_clock::now() + patience;
  if (Ask()) {
    MutexLock lock(state_->mutex);
    while (state_->asking && std::chrono::steady_clock::now() < deadline) {
      state_->changed.WaitUntil(state_->mutex, deadline);
    }
  }
  auto facts = facts_->Fresh();
  if (!facts.has_value()) {
    Log(LogLevel::kWarning, "metrics.machine_unknown",
        {{"waited_ms", absl::StrCat(patience.count())},
         {"message", "what the machine has left could not be had in time: does the driver of the GPUs answer?"}});
  }
  return facts;
}

bool MachineFacts::Ask() {
  {
    MutexLock lock(state_->mutex);
    if (state_->asking) return true;
    state_->asking = true;
  }
  const bool taken = worker_->TrySubmit([facts = facts_, state = state_] {
    facts->Get();
    MutexLock lock(state->mutex);
    state->asking = false;
    state->changed.NotifyAll();
  });
  if (taken) return true;
  MutexLock lock(state_->mutex);
  state_->asking = false;
  return false;
}

}  // namespace weightbroker
