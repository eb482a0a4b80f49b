#include "common/plan/plan.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/plan/architecture.h"
#include "common/plan/region.h"
#include "common/plan/shard_assembly.h"
#include "common/plan/shard_planner.h"
#include "common/plan/source_ranges.h"
#include "common/plan/tensor_roles.h"
#include "common/quant/convert.h"

namespace weightbroker {
namespace {

// Whether the spec asks for nothing but the files as they are, which needs no knowledge of the architecture.
bool IsAsItIs(const v1::WeightSpec& spec) {
  return WorldSize(spec) == 1 && spec.layout() == kHfLayout && spec.quantization() != kQuantizeFp8Block &&
         spec.mtp_layers() == kKeepMtpLayers;
}

absl::StatusOr<ShardPlan> PlanAsItIs(const PlanRequest& request) {
  const v1::WeightSpec& spec = request.spec;
  const DtypeInfo* const dtype = spec.dtype() == kSpecAuto ? nullptr : FindDtype(spec.dtype());
  std::vector<ShardTensor> tensors;
  for (size_t i = 0; i < request.checkpoint.tensors.size(); ++i) {
    const CheckpointTensor& source = request.checkpoint.tensors[i];
    ShardTensor& tensor = tensors.emplace_back();
    tensor.name = source.name;
    tensor.dtype = source.dtype;
    tensor.shape = source.shape;
    tensor.first_source = static_cast<int32_t>(i);
    if (dtype != nullptr && dtype != source.dtype && IsConvertible(*source.dtype) &&
        !absl::EndsWith(source.name, kScaleSuffix)) {
      tensor.dtype = dtype;
      tensor.transform = Transform::kConvert;
    }
    Region region{.source = tensor.first_source, .shape = source.shape, .axis = 0, .cut = {}, .stack = {}};
    region.cut = WholeAxis(source.shape.empty() ? 1 : source.shape[0]);
    AppendCopy(region, 0, tensor.pieces);
  }
  const auto& aliases = request.checkpoint.aliases;
  return AssembleShard(request.checkpoint, 0, std::move(tensors), {aliases.begin(), aliases.end()}, request.max_slabs);
}

absl::StatusOr<const Architecture*> FindArchitecture(const PlanRequest& request) {
  std::vector<std::string> names;
  const auto& config = request.checkpoint.config;
  if (const auto it = config.find("architectures"); it != config.end() && it->is_array()) {
    for (const auto& name : *it) {
      if (!name.is_string()) continue;
      if (const Architecture* found = request.architectures.Find(name.get<std::string>()); found != nullptr)
        return found;
      names.push_back(Printable(name.get<std::string>()));
    }
  }
  const std::string listed = names.empty() ? "none" : absl::StrJoin(names, ", ");
  return MakeError(
      Reason::kArchitectureUnknown,
      absl::StrCat("no architecture file describes ", listed,
                   ", so it is not known how its weights are split, fused or quantized; it is served as it is, at "
                   "tensor parallel size 1 in layout hf; docs/architectures.md shows how to add one with "
                   "--architecture_dir"),
      {{"architectures", listed}});
}

absl::Status CheckRanks(const PlanRequest& request) {
  const int32_t size = WorldSize(request.spec);
  for (const int32_t rank : request.ranks) {
    if (rank >= 0 && rank < size) continue;
    return MakeError(Reason::kRankOutOfRange,
                     absl::StrCat("rank ", rank, " does not exist: with ", size,
                                  size == 1 ? " rank there is only 0" : " ranks they are 0 to ",
                                  size == 1 ? "" : absl::StrCat(size - 1)),
                     {{"found", absl::StrCat(rank)},
                      {"rank_count", absl::StrCat(size)},
                      {"allowed", size == 1 ? "0" : absl::StrCat("0 to ", size - 1)}});
  }
  return absl::OkStatus();
}

// What has to be read of the files for `shards`.
int64_t ReadBytes(const Checkpoint& checkpoint, std::span<const ShardPlan> shards) {
  std::vector<std::vector<PieceUse>> uses(checkpoint.tensors.size());
  for (const ShardPlan& shard : shards) {
    for (const TensorPlacement& tensor : shard.tensors) {
      for (const Piece& piece : tensor.pieces) {
        uses[static_cast<size_t>(piece.source)].push_back({&piece, tensor.transform});
      }
    }
  }
  int64_t bytes = 0;
  for (size_t i = 0; i < uses.size(); ++i) {
    for (const ByteRange& range : WantedBytes(checkpoint.tensors[i], uses[i])) {
      bytes += range.end_bytes - range.begin_bytes;
    }
  }
  return bytes;
}

}  // namespace

absl::StatusOr<NodePlan> PlanNode(const PlanRequest& request) {
  RETURN_IF_ERROR(CheckSpecAgainstCheckpoint(request.spec, request.checkpoint, request.quantization.method));
  RETURN_IF_ERROR(CheckRanks(request));
  NodePlan plan;
  if (IsAsItIs(request.spec)) {
    for (size_t i = 0; i < request.ranks.size(); ++i) {
      ASSIGN_OR_RETURN(plan.shards.emplace_back(), PlanAsItIs(request));
    }
  } else {
    ASSIGN_OR_RETURN(const Architecture* const architecture, FindArchitecture(request));
    ShardPlanner planner(request, *architecture);
    RETURN_IF_ERROR(planner.Prepare());
    for (const int32_t rank : request.ranks) {
      ASSIGN_OR_RETURN(plan.shards.emplace_back(), planner.Plan(rank));
    }
  }
  for (ShardPlan& shard : plan.shards) shard.read_bytes = ReadBytes(request.checkpoint, {&shard, 1});
  plan.read_bytes = ReadBytes(request.checkpoint, plan.shards);
  return plan;
}

}  // namespace weightbroker
