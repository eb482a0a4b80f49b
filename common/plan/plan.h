// The plan of a load: from headers and spec alone, before any memory is taken, where every byte comes from, where it
// lands, and what is done to it on the way; for each rank that a node holds.
//
//   ASSIGN_OR_RETURN(const v1::WeightSpec spec, CompleteSpec(request_spec));
//   auto plan = PlanNode({.checkpoint = checkpoint, .spec = spec, .quantization = quantization,
//                         .architectures = architectures, .ranks = AllRanks(spec)});
//   if (!plan.ok()) return plan.status();          // SPLIT_IMPOSSIBLE: heads, experts or blocks, with the numbers
//   for (const ShardPlan& shard : plan->shards) HostSlab::Create(shard.slab_bytes[0]) ...   // max_slabs: 1
//
// Thread-safe: all functions are pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"
#include "common/quant/gate.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker {

class ArchitectureSet;

inline constexpr int64_t kTensorAlignmentBytes = 256;  // what cudaMalloc gives, and what kernels may assume

// What is done to elements between file and memory.
enum class Transform {
  kCopy,              // bytes as they are
  kConvert,           // between F32, F16 and BF16, rounded to nearest even
  kTranspose,         // runs become columns: see Piece::element_stride; converts as kConvert where types differ
  kQuantizeFp8Block,  // F32, F16 or BF16 to F8_E4M3 in blocks of 128x128; the scales go to
                      // TensorPlacement::scale_tensor
};

// `run_count` runs of `run_elements` elements each, from one tensor of the checkpoint. Run r starts at element
// `source_offset + r * source_stride` of the source, and lands at element `offset + r * stride` of the destination;
// element e of a run lands `e * element_stride` further on. Runs do not overlap, neither in the source nor in the
// destination. With kQuantizeFp8Block the runs are the rows of a matrix, and the first one starts a block.
struct Piece {
  int32_t source = 0;  // into Checkpoint::tensors
  int64_t run_elements = 0;
  int64_t run_count = 1;
  int64_t source_offset = 0;
  int64_t source_stride = 0;
  int64_t offset = 0;
  int64_t stride = 0;
  int64_t element_stride = 1;  // other than 1 with kTranspose only
  int64_t scale_offset = 0;    // kQuantizeFp8Block: the element of the scale tensor that the first block's scale is
  int64_t scale_stride = 0;    // kQuantizeFp8Block: elements of the scale tensor from one row of blocks to the next
};

// One tensor of a shard: a row of its manifest, and what fills it.
struct TensorPlacement {
  std::string name;
  const DtypeInfo* dtype = nullptr;
  std::vector<int64_t> shape;
  int32_t slab = 0;
  int64_t slab_offset_bytes = 0;  // a multiple of kTensorAlignmentBytes
  int64_t size_bytes = 0;
  std::string alias_of;  // if set, shares that tensor's memory, and has no pieces

  Transform transform = Transform::kCopy;
  // What lands in it. Elements that no piece covers are zero (padding of a vocabulary), and memory is all zeros before
  // a load. The scales of a kQuantizeFp8Block tensor have no pieces: they are filled with their weight.
  std::vector<Piece> pieces;
  int32_t scale_tensor = -1;  // kQuantizeFp8Block: into ShardPlan::tensors
  bool is_scale = false;      // of a kQuantizeFp8Block tensor
};

// What one rank holds.
struct ShardPlan {
  int32_t rank = 0;
  std::vector<int64_t> slab_bytes;       // each a multiple of kTensorAlignmentBytes
  std::vector<TensorPlacement> tensors;  // sorted by name, aliases included
  int64_t read_bytes = 0;                // of the files, that land in this shard
};

// What the ranks of one node hold.
struct NodePlan {
  std::vector<ShardPlan> shards;  // in the order of PlanRequest::ranks
  int64_t read_bytes = 0;         // of the files, each counted once however many ranks want it
};

// What CompleteSpec puts for an empty quantization or dtype: whatever the checkpoint has. It may also be asked for.
inline constexpr char kSpecAuto[] = "auto";
// spec.quantization: quantize an unquantized checkpoint to block-wise FP8 while it is loaded.
inline constexpr char kQuantizeFp8Block[] = "fp8_block";
// spec.layout
inline constexpr char kHfLayout[] = "hf";        // the checkpoint's own names, sliced
inline constexpr char kFusedLayout[] = "fused";  // qkv_proj, gate_up_proj, experts.w13_weight, experts.w2_weight
// spec.mtp_layers
inline constexpr char kKeepMtpLayers[] = "keep";
inline constexpr char kDropMtpLayers[] = "drop";

// Fills in defaults (empty or 0: sizes 1, kSpecAuto, kSpecAuto, "hf", "keep") and refuses what no checkpoint could make
// right: INVALID_ARGUMENT for sizes below 1, sizes that do not fit each other, and unknown words of quantization, dtype
// and mtp_layers; LAYOUT_UNSUPPORTED. Does not look at the model path.
absl::StatusOr<v1::WeightSpec> CompleteSpec(const v1::WeightSpec& spec);

// Checks a completed spec against the checkpoint: QUANTIZATION_CONTRADICTED and DTYPE_MISMATCH name both values,
// INVALID_ARGUMENT a module of unquantized_modules that the checkpoint has no tensor of. The checkpoint's dtype is the
// floating-point type that most bytes of its unquantized weights have, FP8 scales left out.
absl::Status CheckSpecAgainstCheckpoint(const v1::WeightSpec& spec, const Checkpoint& checkpoint,
                                        const std::string& quantization_method);

// Of a completed spec: pipeline x data x tensor parallel size.
int32_t WorldSize(const v1::WeightSpec& spec);
std::vector<int32_t> AllRanks(const v1::WeightSpec& spec);  // 0 ... WorldSize - 1

// Everything must outlive the call.
struct PlanRequest {
  const Checkpoint& checkpoint;
  const v1::WeightSpec& spec;  // completed
  const Quantization& quantization;
  const ArchitectureSet& architectures;
  std::vector<int32_t> ranks;
  int max_slabs = 1;  // of a shard
};

// Of a shard in host memory: the kernel lets one thread at a time write to a memfd. Two threads filled one
// with 2.8 GB/s, and two with 5.0.
inline constexpr int kMaxHostSlabs = 8;

// A shard is not divided into slabs of less.
inline constexpr int64_t kLeastSlabBytes = 128 << 20;

// Plans the shards of `request.ranks`. Fails as CheckSpecAgainstCheckpoint does, and with
//   RANK_OUT_OF_RANGE       for a rank that the spec does not have
//   ARCHITECTURE_UNKNOWN    if the spec asks for more than the files as they are, and no architecture file says how
//   ARCHITECTURE_MISMATCH   for a tensor, or a shape, that the architecture file does not describe
//   SPLIT_IMPOSSIBLE        for heads, experts, columns or blocks that do not divide, with the numbers
//   CONFIG_MALFORMED        if the config lacks a number that the split needs
//   CHECKPOINT_TOO_LARGE    past 2^63 bytes
// Tensors are packed in the order in which they lie in the files, so that reading and filling both go forward; each
// slab but the last has at least kLeastSlabBytes, and about as much as the others.
absl::StatusOr<NodePlan> PlanNode(const PlanRequest& request);

}  // namespace weightbroker
