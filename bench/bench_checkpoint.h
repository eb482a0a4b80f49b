// Writes a model folder of any size for the benchmarks: BF16 tensors of pseudo-random bytes, an index with shards. Or
// with holes: only the first page of each tensor has bytes, others than any other tensor's, and a folder of 120 GiB
// takes some MiB of disk.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace weightbroker::bench {

struct BenchCheckpoint {
  int64_t total_bytes = int64_t{2} << 30;  // of all tensors together
  int64_t tensor_count = 600;
  int64_t shard_count = 2;
  bool has_holes = false;
};

// How many bytes of a tensor are written where the folder has holes.
inline constexpr int64_t kHolePageBytes = 4096;

// Writes it into `folder`, which is made if need be, unless what is there already was made from the same values; what
// was made from others is removed, and a folder with anything else in it is refused. Names are
// "model.layers.<n>.weight"; sizes are as equal as multiples of 2 bytes allow.
absl::Status WriteBenchCheckpoint(const std::string& folder, const BenchCheckpoint& checkpoint);

// The path of shard `index`, from 0.
std::string BenchShardPath(const std::string& folder, const BenchCheckpoint& checkpoint, int64_t index);

// A tensor as it lies in its file.
struct BenchTensor {
  std::string name;
  std::string path;
  int64_t offset_bytes = 0;  // from the file's start
  int64_t size_bytes = 0;
};

// All tensors of the folder, sorted by name, as the service's manifest is.
std::vector<BenchTensor> ListBenchTensors(const std::string& folder, const BenchCheckpoint& checkpoint);

}  // namespace weightbroker::bench
