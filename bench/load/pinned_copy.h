// The ceiling of a load to GPUs: copies from pinned host memory, several streams and buffers for each GPU, all GPUs at
// once. A task of a fresh process: see task.h.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/load/task.h"

namespace weightbroker::bench {

// {"seconds", "bytes", "threads", "chunk_bytes"}: of Task::threads streams and Task::chunk_bytes, or, where that is 0,
// of the best of several.
absl::StatusOr<nlohmann::ordered_json> CopyToGpus(const Task& task);

}  // namespace weightbroker::bench
