#include "server/broker/health_facts.h"

namespace weightbroker {
namespace {

constexpr std::chrono::seconds kMaxAge(1);

}  // namespace

HealthFacts::Facts HealthFacts::Get() {
  MutexLock reading(reading_);
  if (auto fresh = Fresh(); fresh.has_value()) return *std::move(fresh);
  Facts facts = read_();
  MutexLock lock(mutex_);
  read_at_ = clock_.SteadyNow();
  facts_ = facts;
  return facts;
}

std::optional<HealthFacts::Facts> HealthFacts::Fresh() const {
  const auto now = clock_.SteadyNow();
  MutexLock lock(mutex_);
  return facts_.has_value() && now - read_at_ < kMaxAge ? facts_ : std::nullopt;
}

}  // namespace weightbroker
