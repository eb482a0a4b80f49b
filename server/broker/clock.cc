#include "server/broker/clock.h"

namespace weightbroker {
namespace {

class SystemClock : public Clock {
 public:
  std::chrono::system_clock::time_point WallNow() const override { return std::chrono::system_clock::now(); }
  std::chrono::steady_clock::time_point SteadyNow() const override { return std::chrono::steady_clock::now(); }
};

}  // namespace

const Clock& RealClock() {
  static const SystemClock* const clock = new SystemClock();
  return *clock;
}

}  // namespace weightbroker
