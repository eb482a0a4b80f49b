// Gives the tensors of a shard their places. Not thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"
#include "common/plan/plan.h"

namespace weightbroker {

// A tensor that a shard is to have, without its place.
struct ShardTensor {
  std::string name;
  const DtypeInfo* dtype = nullptr;
  std::vector<int64_t> shape;
  Transform transform = Transform::kCopy;
  std::vector<Piece> pieces;
  int32_t first_source = 0;  // of all that lands in it, what lies first in the files: orders the slab
  std::string scale_name;    // kQuantizeFp8Block: of the tensor that its scales go to, which is in the shard too
  bool is_scale = false;
};

// Packs `tensors` into up to `max_slabs` slabs in the order in which they lie in the files, and adds `aliases`: name ->
// the tensor whose memory it shares. ARCHITECTURE_MISMATCH for two tensors of one name; CHECKPOINT_MALFORMED for an
// alias of a tensor that is not there; CHECKPOINT_TOO_LARGE past 2^63 bytes.
absl::StatusOr<ShardPlan> AssembleShard(const Checkpoint& checkpoint, int32_t rank, std::vector<ShardTensor> tensors,
                                        const std::vector<std::pair<std::string, std::string>>& aliases, int max_slabs);

}  // namespace weightbroker
