// Starts threads. std::thread throws where the system has none left (a limit of the cgroup or the user, or no memory
// for a stack), which would end the process without a word.
//
//   ASSIGN_OR_RETURN(thread_, StartThread("a load", [this] { Follow(); }));
//
// Thread-safe.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "absl/status/statusor.h"

namespace weightbroker {

// SYSTEM_ERROR naming `what` it is for, if there is none to be had.
absl::StatusOr<std::thread> StartThread(const std::string& what, std::function<void()> body);

// For threads without which a program cannot work at all: ends the process with exit code 1 and a log line instead.
std::thread StartThreadOrExit(const std::string& what, std::function<void()> body);

// Ends the process with exit code 1 and a log line `event` if it still is there after `limit`. If no thread is to be
// had for it, nothing happens.
void ExitUnlessEndedWithin(std::chrono::milliseconds limit, const std::string& event);

}  // namespace weightbroker
