#include "client/tool/plan_command.h"

#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/tool/format.h"
#include "common/base/file.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/checkpoint.h"
#include "common/plan/architecture.h"
#include "common/plan/plan.h"
#include "common/quant/gate.h"

namespace weightbroker::tool {
namespace {

using Json = nlohmann::ordered_json;

// A plan and the checkpoint that it is of.
struct Planned {
  v1::WeightSpec spec;
  Checkpoint checkpoint;
  NodePlan plan;
};

absl::StatusOr<Planned> MakePlan(const PlanFlags& flags) {
  Planned planned;
  std::map<std::string, std::string> files;
  if (!flags.architecture_dir.empty()) {
    ASSIGN_OR_RETURN(files, ReadArchitectureFolder(RealFileSystem(), flags.architecture_dir));
  }
  ASSIGN_OR_RETURN(const ArchitectureSet architectures, ArchitectureSet::WithFiles(files));
  ASSIGN_OR_RETURN(planned.spec, CompleteSpec(flags.spec));
  ASSIGN_OR_RETURN(planned.checkpoint, OpenCheckpoint(RealFileSystem(), flags.folder));
  ASSIGN_OR_RETURN(const Quantization quantization, CheckQuantization(planned.checkpoint));
  ASSIGN_OR_RETURN(planned.plan, PlanNode({.checkpoint = planned.checkpoint,
                                           .spec = planned.spec,
                                           .quantization = quantization,
                                           .architectures = architectures,
                                           .ranks = flags.rank.has_value() ? std::vector<int32_t>{*flags.rank}
                                                                           : AllRanks(planned.spec)}));
  return planned;
}

std::string ShapeText(const std::vector<int64_t>& shape) { return absl::StrCat("[", absl::StrJoin(shape, ", "), "]"); }

std::string RangeText(int64_t begin, int64_t count, int64_t of) {
  return begin == 0 && count == of ? ":" : absl::StrCat(begin, ":", begin + count);
}

// Which part of its source a piece takes, as an index: "[0:512, :]". Where rows of several matrices of a stack are
// taken, the stack counts as rows.
std::string SliceText(const Piece& piece, const CheckpointTensor& source) {
  if (source.shape.empty()) return "[]";
  const int64_t columns = source.shape.size() == 1 ? 1 : source.shape.back();
  const int64_t elements = source.size_bytes * 8 / source.dtype->bits;
  if (columns == 0) return "[:]";
  const int64_t rows = elements / columns;
  if (source.shape.size() == 1)
    return absl::StrCat("[", RangeText(piece.source_offset, piece.run_elements, elements), "]");
  if (piece.run_count == 1 && piece.run_elements % columns == 0) {
    const std::string range = RangeText(piece.source_offset / columns, piece.run_elements / columns, rows);
    return absl::StrCat("[", range, ", :]");
  }
  if (piece.source_stride == columns) {
    return absl::StrCat("[", RangeText(piece.source_offset / columns, piece.run_count, rows), ", ",
                        RangeText(piece.source_offset % columns, piece.run_elements, columns), "]");
  }
  return absl::StrCat("[", piece.source_offset / columns, ":, :] ", piece.run_count, " times ",
                      piece.run_elements / columns, " rows every ", piece.source_stride / columns);
}

const char* TransformText(Transform transform) {
  switch (transform) {
    case Transform::kCopy:
      return "copy";
    case Transform::kConvert:
      return "convert";
    case Transform::kTranspose:
      return "transpose";
    case Transform::kQuantizeFp8Block:
      return "quantize_fp8_block";
  }
  return "unknown";
}

std::string SourceText(const TensorPlacement& tensor, const Checkpoint& checkpoint) {
  constexpr size_t kShown = 3;
  if (!tensor.alias_of.empty()) return absl::StrCat("is ", tensor.alias_of);
  if (tensor.is_scale) return "scales of the blocks";
  if (tensor.pieces.empty()) return "zeros";
  std::string text;
  for (size_t i = 0; i < tensor.pieces.size() && i < kShown; ++i) {
    const CheckpointTensor& source = checkpoint.tensors[static_cast<size_t>(tensor.pieces[i].source)];
    absl::StrAppend(&text, i > 0 ? " + " : "", source.name == tensor.name ? "" : source.name,
                    SliceText(tensor.pieces[i], source));
  }
  if (tensor.pieces.size() > kShown) absl::StrAppend(&text, " + ", tensor.pieces.size() - kShown, " more");
  return text;
}

int64_t SlabBytes(const ShardPlan& shard) {
  return std::accumulate(shard.slab_bytes.begin(), shard.slab_bytes.end(), int64_t{0});
}

void PrintTable(const Planned& planned) {
  const ShardPlan& shown = planned.plan.shards.front();
  std::vector<std::vector<std::string>> rows = {{"TENSOR", "DTYPE", "SHAPE", "BYTES", "HOW", "FROM"}};
  for (const TensorPlacement& tensor : shown.tensors) {
    rows.push_back(
        {tensor.name, std::string(tensor.dtype->name), ShapeText(tensor.shape), absl::StrCat(tensor.size_bytes),
         tensor.alias_of.empty() ? TransformText(tensor.transform) : "alias", SourceText(tensor, planned.checkpoint)});
  }
  std::printf("rank %d:\n%s\n", shown.rank, FormatTable(rows).c_str());
  std::vector<std::vector<std::string>> totals = {{"RANK", "TENSORS", "MEMORY", "BYTES", "READ"}};
  for (const ShardPlan& shard : planned.plan.shards) {
    totals.push_back({absl::StrCat(shard.rank), absl::StrCat(shard.tensors.size()), FormatBytes(SlabBytes(shard)),
                      absl::StrCat(SlabBytes(shard)), absl::StrCat(shard.read_bytes)});
  }
  std::printf("%s\nread once for all of them: %s of %s\n", FormatTable(totals).c_str(),
              FormatBytes(planned.plan.read_bytes).c_str(), FormatBytes(planned.checkpoint.total_bytes).c_str());
}

Json PieceJson(const Piece& piece, const Checkpoint& checkpoint) {
  const CheckpointTensor& source = checkpoint.tensors[static_cast<size_t>(piece.source)];
  return {{"source", source.name},
          {"file", checkpoint.files.shard_names[static_cast<size_t>(source.file_index)]},
          {"file_offset_bytes", source.offset_bytes + piece.source_offset * source.dtype->bits / 8},
          {"source_dtype", std::string(source.dtype->name)},
          {"slice", SliceText(piece, source)},
          {"run_elements", piece.run_elements},
          {"run_count", piece.run_count},
          {"source_stride_elements", piece.source_stride},
          {"offset_elements", piece.offset},
          {"stride_elements", piece.stride},
          {"element_stride", piece.element_stride}};
}

Json ShardJson(const ShardPlan& shard, const Checkpoint& checkpoint) {
  Json tensors = Json::array();
  for (const TensorPlacement& tensor : shard.tensors) {
    Json pieces = Json::array();
    for (const Piece& piece : tensor.pieces) pieces.push_back(PieceJson(piece, checkpoint));
    tensors.push_back({{"name", tensor.name},
                       {"dtype", std::string(tensor.dtype->name)},
                       {"shape", tensor.shape},
                       {"size_bytes", tensor.size_bytes},
                       {"slab", tensor.slab},
                       {"offset_bytes", tensor.slab_offset_bytes},
                       {"alias_of", tensor.alias_of},
                       {"transform", TransformText(tensor.transform)},
                       {"pieces", pieces}});
  }
  return {
      {"rank", shard.rank}, {"slab_bytes", shard.slab_bytes}, {"read_bytes", shard.read_bytes}, {"tensors", tensors}};
}

void PrintPlanJson(const Planned& planned) {
  Json ranks = Json::array();
  for (const ShardPlan& shard : planned.plan.shards) ranks.push_back(ShardJson(shard, planned.checkpoint));
  const Json json = {
      {"ranks", ranks}, {"read_bytes", planned.plan.read_bytes}, {"file_bytes", planned.checkpoint.total_bytes}};
  std::printf("%s\n", json.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
}

}  // namespace

ExitCode RunPlan(const PlanFlags& flags) {
  const auto planned = MakePlan(flags);
  if (!planned.ok()) return PrintError(planned.status(), flags.json);
  if (flags.json) {
    PrintPlanJson(*planned);
  } else {
    PrintTable(*planned);
  }
  return kDone;
}

}  // namespace weightbroker::tool
