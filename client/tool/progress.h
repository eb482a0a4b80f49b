// Shows how far a load is: a bar that is redrawn on a terminal, else a line when the phase changes and every two
// seconds. Not thread-safe.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "weightbroker/client.h"

namespace weightbroker::tool {

class ProgressPrinter {
 public:
  ProgressPrinter();   // asks whether stderr is a terminal
  ~ProgressPrinter();  // ends the bar's line
  ProgressPrinter(const ProgressPrinter&) = delete;
  ProgressPrinter& operator=(const ProgressPrinter&) = delete;

  void Show(const LoadProgress& progress);

 private:
  using Clock = std::chrono::steady_clock;

  const bool is_terminal_;
  bool bar_drawn_ = false;
  std::string last_phase_;
  std::optional<Clock::time_point> last_line_;
};

}  // namespace weightbroker::tool
