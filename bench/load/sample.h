// One sample of an arm, and what an arm is.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/load/plain_read.h"

namespace weightbroker::bench {

struct Sample {
  double load_seconds = 0;         // from "the process is ready" to all tensors there, devices synchronized
  double exec_seconds = 0;         // from its start to that
  nlohmann::ordered_json figures;  // those two, bytes, what was used, and whatever else the arm tells
  DigestsByName digests;           // if they were asked for and can be compared
};

struct Arm {
  std::string name;
  std::string what;  // for people
  std::string version;
  bool same_bytes = true;  // as in the files; else only ours can say what they should be
  // Names of ceilings, the lowest of which is the arm's.
  std::vector<std::string> ceilings;
  // Takes a sample in a fresh process. With `verify` the digests of what is in memory are taken after it.
  std::function<absl::StatusOr<Sample>(bool verify)> take;
};

}  // namespace weightbroker::bench
