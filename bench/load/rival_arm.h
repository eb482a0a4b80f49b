// The arms that rival.py has, each sample a Python process of its own.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/load/sample.h"

namespace weightbroker::bench {

struct RivalSetup {
  std::string python = "python3";  // looked up in PATH; finds torch and the loaders itself
  std::string script = WEIGHTBROKER_RIVAL_SCRIPT;
  std::string device = "cpu";  // or "cuda:0"
};

// {"python", "torch", "arms": {name: {"version"} or {"absent": why}}}, or "absent" in place of them all.
nlohmann::ordered_json ProbeRivals(const RivalSetup& setup);

absl::StatusOr<Sample> RunRival(const RivalSetup& setup, const std::string& arm, const std::string& folder,
                                bool verify);

}  // namespace weightbroker::bench
