// The plan of a load: from headers and spec alone, before any memory is taken, where every byte comes from and where it
// lands.
//
//   auto plan = PlanShard(*checkpoint, /*rank=*/0);
//   if (!plan.ok()) return plan.status();
//   HostSlab::Create(plan->slab_bytes[0]) ...
//
// Thread-safe: all functions are pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker {

inline constexpr int64_t kTensorAlignmentBytes = 256;  // what cudaMalloc gives, and what kernels may assume

struct TensorPlacement {
  std::string name;
  const DtypeInfo* dtype = nullptr;
  std::vector<int64_t> shape;
  int32_t slab = 0;
  int64_t slab_offset_bytes = 0;  // a multiple of kTensorAlignmentBytes
  int64_t size_bytes = 0;
  std::string alias_of;           // if set, shares that tensor's memory, and is not read
  int32_t file_index = 0;         // into Checkpoint::files.shard_names
  int64_t file_offset_bytes = 0;  // from the start of the file
};

struct ShardPlan {
  std::vector<int64_t> slab_bytes;       // each a multiple of kTensorAlignmentBytes
  std::vector<TensorPlacement> tensors;  // sorted by name, aliases included
  int64_t read_bytes = 0;                // of all tensors that are read
};

// What CompleteSpec puts for an empty quantization or dtype: whatever the checkpoint has. It may also be asked for.
inline constexpr char kSpecAuto[] = "auto";

// Fills in defaults (empty: TP 1, kSpecAuto, kSpecAuto, "hf") and refuses what this version cannot do:
// PARALLELISM_UNSUPPORTED above TP 1, LAYOUT_UNSUPPORTED other than "hf", INVALID_ARGUMENT for unknown quantization or
// dtype words. Does not look at the model path.
absl::StatusOr<v1::WeightSpec> CompleteSpec(const v1::WeightSpec& spec);

// Checks a completed spec against the checkpoint: QUANTIZATION_CONTRADICTED and DTYPE_MISMATCH name both values. The
// checkpoint's dtype is the floating-point type that most bytes of its unquantized weights have, FP8 scales left out.
absl::Status CheckSpecAgainstCheckpoint(const v1::WeightSpec& spec, const Checkpoint& checkpoint,
                                        const std::string& quantization_method);

// Of a completed spec: how many ranks there are.
int32_t WorldSize(const v1::WeightSpec& spec);

// Plans one rank's shard. Tensors are packed into one slab in the order in which they lie in the files, so that reading
// and filling both go forward. RANK_OUT_OF_RANGE for any rank but 0; CHECKPOINT_TOO_LARGE past 2^63 bytes.
absl::StatusOr<ShardPlan> PlanShard(const Checkpoint& checkpoint, int32_t rank);

}  // namespace weightbroker
