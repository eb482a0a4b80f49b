// Writes a model folder of any size for the benchmarks: BF16 tensors of pseudo-random bytes, an index with shards.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace weightbroker::bench {

struct BenchCheckpoint {
  int64_t total_bytes = int64_t{2} << 30;  // of all tensors together
  int64_t tensor_count = 600;
  int64_t shard_count = 2;
};

// Writes it into `folder`, which is made if need be, unless what is there already was made from the same values; what
// was made from others is removed, and a folder with anything else in it is refused. Names are
// "model.layers.<n>.weight"; sizes are as equal as multiples of 2 bytes allow.
absl::Status WriteBenchCheckpoint(const std::string& folder, const BenchCheckpoint& checkpoint);

// The path of shard `index`, from 0.
std::string BenchShardPath(const std::string& folder, const BenchCheckpoint& checkpoint, int64_t index);

}  // namespace weightbroker::bench
