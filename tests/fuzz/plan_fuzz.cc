// The input is an architecture file, config.json and an expression, each with a NUL byte behind, then the sizes of a
// spec in a byte each. They are to split the tensors of a small model of the Llama family.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "common/base/json.h"
#include "common/plan/architecture.h"
#include "common/plan/expression.h"
#include "common/plan/plan.h"
#include "common/plan/region.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/target.h"

namespace weightbroker {
namespace {

constexpr int64_t kHidden = 256;
constexpr const char* kLayouts[] = {"hf", "fused"};
constexpr const char* kQuantizations[] = {"auto", "fp8_block"};

struct TensorShape {
  const char* name;
  std::vector<int64_t> shape;
};

std::vector<CheckpointTensor> MakeTensors() {
  std::vector<TensorShape> rows = {{"lm_head.weight", {384, kHidden}},
                                   {"model.embed_tokens.weight", {384, kHidden}},
                                   {"model.norm.weight", {kHidden}}};
  static constexpr const char* kLayers[] = {"model.layers.0.", "model.layers.1."};
  std::vector<std::pair<std::string, std::vector<int64_t>>> tensors;
  for (const TensorShape& row : rows) tensors.emplace_back(row.name, row.shape);
  for (const std::string layer : kLayers) {
    tensors.push_back({layer + "input_layernorm.weight", {kHidden}});
    tensors.push_back({layer + "self_attn.q_proj.weight", {kHidden, kHidden}});
    tensors.push_back({layer + "self_attn.k_proj.weight", {128, kHidden}});
    tensors.push_back({layer + "self_attn.v_proj.weight", {128, kHidden}});
    tensors.push_back({layer + "self_attn.o_proj.weight", {kHidden, kHidden}});
    tensors.push_back({layer + "mlp.gate_proj.weight", {512, kHidden}});
    tensors.push_back({layer + "mlp.up_proj.weight", {512, kHidden}});
    tensors.push_back({layer + "mlp.down_proj.weight", {kHidden, 512}});
  }
  std::sort(tensors.begin(), tensors.end());
  std::vector<CheckpointTensor> result;
  int64_t offset_bytes = 8;
  for (auto& [name, shape] : tensors) {
    const int64_t size_bytes = 2 * ElementCount(shape);
    result.push_back({name, FindDtype("BF16"), shape, 0, offset_bytes, size_bytes});
    offset_bytes += size_bytes;
  }
  return result;
}

Checkpoint MakeCheckpoint(nlohmann::json config) {
  static const auto* const tensors = new std::vector<CheckpointTensor>(MakeTensors());
  Checkpoint checkpoint;
  checkpoint.files.shard_names = {"model.safetensors"};
  checkpoint.config = std::move(config);
  checkpoint.tensors = *tensors;
  for (const CheckpointTensor& tensor : checkpoint.tensors) checkpoint.total_bytes += tensor.size_bytes;
  return checkpoint;
}

v1::WeightSpec TakeSpec(std::string_view& input) {
  v1::WeightSpec spec;
  spec.set_tensor_parallel_size(TakeInteger<uint8_t>(input) % 5);
  spec.set_pipeline_parallel_size(TakeInteger<uint8_t>(input) % 3);
  spec.set_expert_parallel_size(TakeInteger<uint8_t>(input) % 3);
  spec.set_data_parallel_size(TakeInteger<uint8_t>(input) % 3);
  const auto words = TakeInteger<uint8_t>(input);
  spec.set_layout(kLayouts[words % 2]);
  spec.set_quantization(kQuantizations[words / 2 % 2]);
  return spec;
}

void CheckPiece(const Checkpoint& checkpoint, const TensorPlacement& tensor, const Piece& piece) {
  FUZZ_CHECK(piece.source >= 0 && static_cast<size_t>(piece.source) < checkpoint.tensors.size());
  FUZZ_CHECK(piece.run_elements > 0 && piece.run_count > 0 && piece.source_offset >= 0 && piece.offset >= 0);
  const int64_t source_end = piece.source_offset + (piece.run_count - 1) * piece.source_stride + piece.run_elements;
  FUZZ_CHECK(source_end <= ElementCount(checkpoint.tensors[static_cast<size_t>(piece.source)].shape));
  const int64_t end =
      piece.offset + (piece.run_count - 1) * piece.stride + (piece.run_elements - 1) * piece.element_stride + 1;
  FUZZ_CHECK(end <= ElementCount(tensor.shape));
}

void CheckShard(const Checkpoint& checkpoint, const ShardPlan& shard) {
  std::vector<std::pair<int64_t, int64_t>> extents;
  for (const TensorPlacement& tensor : shard.tensors) {
    FUZZ_CHECK(tensor.slab >= 0 && static_cast<size_t>(tensor.slab) < shard.slab_bytes.size());
    FUZZ_CHECK(tensor.slab_offset_bytes >= 0 && tensor.slab_offset_bytes % kTensorAlignmentBytes == 0);
    FUZZ_CHECK(tensor.slab_offset_bytes + tensor.size_bytes <= shard.slab_bytes[static_cast<size_t>(tensor.slab)]);
    FUZZ_CHECK(tensor.size_bytes * 8 == ElementCount(tensor.shape) * tensor.dtype->bits);
    for (const Piece& piece : tensor.pieces) CheckPiece(checkpoint, tensor, piece);
    if (tensor.alias_of.empty() && tensor.size_bytes > 0) {
      extents.emplace_back(tensor.slab_offset_bytes, tensor.slab_offset_bytes + tensor.size_bytes);
    }
  }
  std::sort(extents.begin(), extents.end());
  for (size_t i = 1; i < extents.size(); ++i) FUZZ_CHECK(extents[i - 1].second <= extents[i].first);
  FUZZ_CHECK(std::is_sorted(shard.tensors.begin(), shard.tensors.end(),
                            [](const TensorPlacement& a, const TensorPlacement& b) { return a.name < b.name; }));
}

void Plan(const ArchitectureSet& architectures, const nlohmann::json& config, std::string_view input) {
  const auto spec = CompleteSpec(TakeSpec(input));
  if (!spec.ok()) return CheckRefusal(spec.status());
  const Checkpoint checkpoint = MakeCheckpoint(config);
  const Quantization quantization;
  const auto plan = PlanNode({.checkpoint = checkpoint,
                              .spec = *spec,
                              .quantization = quantization,
                              .architectures = architectures,
                              .ranks = AllRanks(*spec)});
  if (!plan.ok()) return CheckRefusal(plan.status());
  FUZZ_CHECK(static_cast<int32_t>(plan->shards.size()) == WorldSize(*spec));
  for (const ShardPlan& shard : plan->shards) CheckShard(checkpoint, shard);
}

void Evaluate(const nlohmann::json& config, std::string_view expression) {
  if (!ConfigNumbers::IsWellFormed(expression)) return;
  ConfigNumbers numbers(config, {"", "text_config"});
  numbers.Define("defined", {"a * b", "hidden_size / num_attention_heads"});
  const auto value = numbers.Evaluate(expression);
  if (value.ok()) {
    FUZZ_CHECK(*value >= 0);
  } else {
    CheckRefusal(value.status());
  }
}

}  // namespace
}  // namespace weightbroker

FUZZ_TARGET(plan) {
  using namespace weightbroker;
  const std::string architecture(TakeText(input));
  const auto config = ParseStrictJson(TakeText(input));
  const std::string_view expression = TakeText(input);
  const auto architectures = ArchitectureSet::WithFiles({{"fuzz.json", architecture}});
  if (!architectures.ok()) CheckRefusal(architectures.status());
  if (!config.ok() || !config->is_object()) return;
  Evaluate(*config, expression);
  Plan(architectures.ok() ? *architectures : ArchitectureSet::Embedded(), *config, input);
}
