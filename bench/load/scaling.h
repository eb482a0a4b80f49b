// How our load's time goes with the number of reader threads, the length of a read, and the number of tensors that the
// same bytes are divided into. Ours alone; the settings of one table take turns.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "bench/load/size_bench.h"

namespace weightbroker::bench {

struct ScalingRequest {
  std::string folder;  // model folders come into it
  int64_t bytes = 0;
  bool keep = false;  // what has been written
};

// {"reader_threads": {"1": {"bytes_per_second", "figures", "samples"}, ...}, "chunk_bytes": ..., "tensors": ...}
absl::StatusOr<nlohmann::ordered_json> MeasureScaling(const LoadSetup& setup, const ScalingRequest& request,
                                                      CacheState state);

}  // namespace weightbroker::bench
