#include "common/plan/topology.h"

namespace weightbroker {

RankPlaces PlacesOf(const v1::WeightSpec& spec, int32_t rank) {
  const int64_t tensor = spec.tensor_parallel_size();
  const int64_t in_stage = tensor * spec.data_parallel_size();
  const int64_t groups = spec.expert_parallel_size();
  const int64_t group_size = in_stage / groups;
  const int64_t index = rank % in_stage;
  return {.stage = {rank / in_stage, spec.pipeline_parallel_size()},
          .tensor = {index % tensor, tensor},
          .expert_group = {index / group_size, groups},
          .expert_part = {index % group_size, group_size}};
}

LayerRange LayersOf(int64_t layer_count, const Place& stage) {
  const int64_t even = layer_count / stage.size;
  const int64_t left_over = layer_count % stage.size;
  // Stages [size - 1 - left_over, size - 1) have one more.
  const int64_t first_with_more = stage.size - 1 - left_over;
  const auto more_before = [&](int64_t index) {
    if (index <= first_with_more) return int64_t{0};
    return index < stage.size ? index - first_with_more : left_over;
  };
  return {even * stage.index + more_before(stage.index), even * (stage.index + 1) + more_before(stage.index + 1)};
}

}  // namespace weightbroker
