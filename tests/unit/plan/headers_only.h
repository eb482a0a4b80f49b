// A checkpoint that exists as headers only: what the planner needs, at the sizes of a real model.
//
//   const Checkpoint checkpoint = HeadersOnly("LlamaForCausalLM", {{"hidden_size", 4096}, ...})
//                                     .Tensor("lm_head.weight", "BF16", {128'256, 4096}).Build();
#pragma once

#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "common/checkpoint/checkpoint.h"
#include "common/plan/architecture.h"
#include "common/plan/plan.h"
#include "common/plan/region.h"

namespace weightbroker {

class HeadersOnly {
 public:
  HeadersOnly(const std::string& architecture, const nlohmann::json& config) {
    checkpoint_.config = config;
    checkpoint_.config["architectures"] = {architecture};
    checkpoint_.files.shard_names = {"model.safetensors"};
  }

  HeadersOnly& Tensor(const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape) {
    const DtypeInfo* const info = FindDtype(dtype);
    const int64_t size_bytes = ElementCount(shape) * info->bits / 8;
    checkpoint_.tensors.push_back({name, info, shape, 0, end_bytes_, size_bytes});
    end_bytes_ += size_bytes;
    return *this;
  }

  // A weight in FP8 and its scales.
  HeadersOnly& Fp8(const std::string& name, int64_t rows, int64_t columns) {
    Tensor(name, "F8_E4M3", {rows, columns});
    return Tensor(name + "_scale_inv", "F32", {(rows + 127) / 128, (columns + 127) / 128});
  }

  Checkpoint Build() const {
    Checkpoint checkpoint = checkpoint_;
    std::sort(checkpoint.tensors.begin(), checkpoint.tensors.end(),
              [](const CheckpointTensor& a, const CheckpointTensor& b) { return a.name < b.name; });
    checkpoint.total_bytes = end_bytes_;
    return checkpoint;
  }

 private:
  Checkpoint checkpoint_;
  int64_t end_bytes_ = 0;
};

struct Sizes {
  int tensor = 1;
  int pipeline = 1;
  int expert = 1;
  int data = 1;
};

inline v1::WeightSpec SpecFor(const Sizes& sizes, const std::string& layout = "hf",
                              const std::string& quantization = "") {
  v1::WeightSpec spec;
  spec.set_tensor_parallel_size(sizes.tensor);
  spec.set_pipeline_parallel_size(sizes.pipeline);
  spec.set_expert_parallel_size(sizes.expert);
  spec.set_data_parallel_size(sizes.data);
  spec.set_layout(layout);
  spec.set_quantization(quantization);
  return spec;
}

// All ranks.
inline absl::StatusOr<NodePlan> PlanAll(const Checkpoint& checkpoint, const v1::WeightSpec& wanted,
                                        const ArchitectureSet& architectures = ArchitectureSet::Embedded()) {
  const auto spec = CompleteSpec(wanted);
  if (!spec.ok()) return spec.status();
  const bool is_fp8 = std::any_of(checkpoint.tensors.begin(), checkpoint.tensors.end(),
                                  [](const CheckpointTensor& t) { return t.dtype->proto == v1::DATA_TYPE_F8_E4M3; });
  Quantization quantization;
  quantization.method = is_fp8 ? "fp8" : "none";
  return PlanNode({.checkpoint = checkpoint,
                   .spec = *spec,
                   .quantization = quantization,
                   .architectures = architectures,
                   .ranks = AllRanks(*spec)});
}

inline const TensorPlacement* FindTensor(const ShardPlan& shard, const std::string& name) {
  for (const TensorPlacement& tensor : shard.tensors) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

}  // namespace weightbroker
