#include "server/broker/health_facts.h"

namespace weightbroker {
namespace {

constexpr std::chrono::seconds kMaxAge(1);

}  // namespace

HealthFacts::Facts HealthFacts::Get() {
  const auto now = clock_.SteadyNow();
  MutexLock lock(mutex_);
  if (!facts_.has_value() || now - read_at_ >= kMaxAge) {
    facts_ = read_();
    read_at_ = now;
  }
  return *facts_;
}

}  // namespace weightbroker
