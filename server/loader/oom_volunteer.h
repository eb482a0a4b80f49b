// Makes this process the first that the kernel ends where memory runs out, until it withdraws.
//
//   OomVolunteer volunteer;          // at work: the load should go, and not the broker or an engine
//   ...
//   volunteer.Withdraw();            // others depend on what it holds
//
// Not thread-safe.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace weightbroker {

class OomVolunteer {
 public:
  // Volunteers at once. Where the kernel does not let it, the process is as likely a choice as any other of its size.
  explicit OomVolunteer(std::string path = "/proc/self/oom_score_adj");

  // Puts back the score that the process was started with, which needs no privilege. SYSTEM_ERROR if it cannot.
  absl::Status Withdraw();

 private:
  const std::string path_;
  std::string score_;  // as it was; empty if that could not be read
};

}  // namespace weightbroker
