#include "bench/load/rival_arm.h"

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "bench/bench_process.h"
#include "bench/bench_support.h"
#include "bench/load/task.h"
#include "common/base/status_macros.h"

namespace weightbroker::bench {
namespace {

constexpr char kEnv[] = "/usr/bin/env";  // looks a program up in PATH

}  // namespace

nlohmann::ordered_json ProbeRivals(const RivalSetup& setup) {
  absl::StatusOr<nlohmann::ordered_json> found =
      RunForJson({.path = kEnv, .arguments = {setup.python, setup.script, "probe", "--device", setup.device}});
  if (found.ok()) return *std::move(found);
  return {{"absent", std::string(found.status().message())}, {"arms", nlohmann::ordered_json::object()}};
}

absl::StatusOr<Sample> RunRival(const RivalSetup& setup, const std::string& arm, const std::string& folder,
                                bool verify) {
  const SocketFolder scratch;
  const std::string digests = scratch / "digests.json";
  std::vector<std::string> arguments = {setup.python,        setup.script, "sample",   "--arm",      arm,
                                        "--folder",          folder,       "--device", setup.device, "--started_at",
                                        Digits(NowSeconds())};
  if (verify) arguments.insert(arguments.end(), {"--digests", digests});
  Sample sample;
  ASSIGN_OR_RETURN(sample.figures, RunForJson({.path = kEnv, .arguments = arguments}));
  sample.load_seconds = sample.figures["load_seconds"];
  sample.exec_seconds = sample.figures["exec_seconds"];
  if (verify) {
    ASSIGN_OR_RETURN(sample.digests, ReadDigestsFile(digests));
  }
  return sample;
}

}  // namespace weightbroker::bench
