// Whether GPU memory holds what its manifest says: a process of its own maps the slabs read-only, as an engine would,
// and takes every tensor's digest on the GPU.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/load/task.h"
#include "common/base/unique_fd.h"

namespace weightbroker::bench {

// One rank's memory as it was handed over.
struct GpuShardView {
  std::string device;  // its GPU's UUID
  int manifest_fd = -1;
  int64_t manifest_bytes = 0;
  std::span<const UniqueFd> slabs;
  std::vector<int64_t> slab_bytes;
};

// DIGEST_MISMATCH in the message if a tensor is another one.
absl::Status VerifyInFreshProcess(const GpuShardView& shard);

// In that process: Task::devices has the GPU, Task::bytes the manifest's length.
absl::StatusOr<nlohmann::ordered_json> VerifyGpuMemory(const Task& task);

}  // namespace weightbroker::bench
