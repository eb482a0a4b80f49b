// What a process of the benchmark measures: each arm runs in one that was started for it, prints one JSON object, and
// ends.
#pragma once

#include <cstdint>
#include <string>

namespace weightbroker::bench {

struct ArmFlags {
  std::string arm;  // "unary", "attach", "steps" or "client"
  std::string service_socket;
  std::string grpc_echo_socket;
  std::string raw_echo_socket;
  std::string model;        // a folder
  std::string fingerprint;  // of the model as it is resident
  int calls = 0;
  int warm_up_calls = 0;
  int attaches = 0;
};

// The descriptor on which "client" waits, once it has connected, until it reads the end of it: all clients start at
// once.
inline constexpr int kStartFd = 3;

// Runs one arm. An exit code.
//   unary   microseconds of each call, the kinds taking turns: Health, Fingerprint, the stat calls that it makes (by
//           this process itself), a bare gRPC echo, a raw socket echo
//   attach  seconds from a connected client's Attach to a tensor found by name
//   steps   seconds of each step, see attach_steps.h
//   client  microseconds of Health and of the bare echo, taking turns; seconds of attaches; and errors, counted
int RunArm(const ArmFlags& flags);

}  // namespace weightbroker::bench
