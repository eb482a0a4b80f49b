// What standby_bench watches: an engine of a group, in a process of its own, which tells the observer of each step.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace weightbroker::bench {

// What a member tells, one datagram each over its report socket.
struct MemberReport {
  enum class Step : int32_t {
    kJoined,  // attached, every page mapped, and a member
    kActive,  // active, and has read weights as such
    kHolds,   // and has touched all the memory of its own that it was to hold
    kFenced,  // was active, and IsActive says that it is no longer
  };
  Step step = Step::kJoined;
  uint64_t epoch = 0;
  double woken_at = 0;  // seconds on CLOCK_MONOTONIC, of kActive: before reading
  double read_at = 0;   // and after
  uint64_t byte = 0;    // what was read
};

struct MemberFlags {
  std::string socket;
  std::string model;
  std::string group;
  int64_t hold_bytes = 0;
  int timeout_ms = 200;
  bool huge_pages = false;
  bool gpu = false;
};

// Sits in the parent's file descriptors under these numbers: the socket for reports, and one that says nothing, whose
// closing by the kernel is what a peer without a group would see.
inline constexpr int kReportFd = 3;
inline constexpr int kSilentFd = 4;

// Takes part until it is killed. Returns only if it could not.
absl::Status RunMember(const MemberFlags& flags);

}  // namespace weightbroker::bench
