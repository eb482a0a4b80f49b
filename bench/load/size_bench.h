// Measures one model folder in one state of the page cache: ceilings first, then rounds in which every ceiling and
// every arm takes a turn, so that a slow minute of the machine hits all alike.
//
//   ASSIGN_OR_RETURN(const nlohmann::ordered_json report, MeasureModel(setup, model, CacheState::kCold));
//
// Before the rounds that count, each arm takes one sample that does not: it warms the program's own files, and the
// bytes of every tensor must then have the digests of those in the files.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/load/model_folder.h"
#include "bench/load/page_cache.h"
#include "bench/load/rival_arm.h"

namespace weightbroker::bench {

struct LoadSetup {
  std::string loader;
  std::vector<std::string> gpus;  // UUIDs; empty: loads are to host memory
  int tensor_parallel = 1;        // above 1: also an arm whose weights are split over so many devices
  std::string quantization;       // not empty: also an arm that quantizes
  RivalSetup rivals;
  nlohmann::ordered_json probed;  // what ProbeRivals has found
  std::vector<std::string> arms;  // only these; empty: all
  int rounds = 5;
};

absl::StatusOr<nlohmann::ordered_json> MeasureModel(const LoadSetup& setup, const ModelFolder& model, CacheState state);

}  // namespace weightbroker::bench
