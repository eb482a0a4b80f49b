// What a client can do to a service, deliberately or by mistake, each until it is told to stop: by bytes alone, without
// gRPC.
//
//   const Attack* attack = FindAttack("silent");
//   const AttackReport report = attack->run({.socket = path, .model = "models:m", .fingerprint = hash, ...});
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <string>

namespace weightbroker::testing {

struct AttackPlan {
  std::string socket;
  std::string fingerprint;  // of a resident set
  std::chrono::milliseconds duration{5000};
  uint32_t seed = 1;
};

struct AttackReport {
  int64_t attempts = 0;  // connections, or calls where one connection has many
  int64_t refused = 0;   // of them closed or answered with an error by the service
  int64_t open = 0;      // connections that the service has left open to the end, though they do nothing right
};

struct Attack {
  const char* name;
  const char* what;
  AttackReport (*run)(const AttackPlan& plan);
};

std::span<const Attack> Attacks();
const Attack* FindAttack(const std::string& name);

}  // namespace weightbroker::testing
