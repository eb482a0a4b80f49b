// Plans shards of a checkpoint whose architecture is known. See plan.h.
//
//   ShardPlanner planner(request, *architecture);
//   RETURN_IF_ERROR(planner.Prepare());
//   ASSIGN_OR_RETURN(const ShardPlan shard, planner.Plan(rank));
//
// Thread-safe once prepared.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/plan/architecture_rules.h"
#include "common/plan/expression.h"
#include "common/plan/plan.h"
#include "common/plan/region.h"
#include "common/plan/shard_assembly.h"
#include "common/plan/tensor_roles.h"
#include "common/plan/topology.h"
#include "common/quant/module_set.h"

namespace weightbroker {

class ShardPlanner {
 public:
  // Both outlive this object.
  ShardPlanner(const PlanRequest& request, const Architecture& architecture);

  // What is the same for all ranks. Fails as PlanNode does.
  absl::Status Prepare();

  absl::StatusOr<ShardPlan> Plan(int32_t rank) const;

 private:
  // What a rank holds of one tensor of the checkpoint.
  struct Part {
    const TensorRole* role = nullptr;
    Region region;
    bool quantize = false;
  };
  // What the fused layout puts into one tensor: parts by expert (0 where there are none) and position.
  struct FusedGroup {
    const FusedRule* rule = nullptr;
    std::map<std::pair<int64_t, size_t>, Part> parts;
  };

  const CheckpointTensor& TensorOf(const TensorRole& role) const;
  absl::Status CheckArchitectureAllows() const;
  absl::Status CheckLayer(const TensorRole& role) const;
  void FindTied();

  bool IsHeld(const TensorRole& role, const RankPlaces& places) const;
  bool IsOnStage(const TensorRole& role, const Place& stage) const;
  std::vector<std::pair<std::string, std::string>> AliasesOn(const Place& stage) const;

  bool IsQuantizedOnTheFly(const TensorRole& role) const;
  bool IsFp8(const TensorRole& role) const;
  bool IsUncut(const TensorRole& role) const;
  absl::StatusOr<Part> Cut(const TensorRole& role, const RankPlaces& places) const;
  // Turns the region of an FP8 weight into that of its scales.
  static void ToScales(Region& region);
  absl::Status CheckBlocks(const TensorRole& role, const Region& region, const Place& place) const;
  const FusedRule* FusedRuleFor(const TensorRole& role, size_t& position) const;

  // The two layouts.
  void AddAsItIs(const Part& part, std::vector<ShardTensor>& tensors) const;
  absl::Status AddFused(const std::string& name, const FusedGroup& group, const RankPlaces& places,
                        std::vector<ShardTensor>& tensors) const;
  absl::Status CheckComplete(const std::string& name, const FusedGroup& group, const RankPlaces& places) const;
  absl::Status CheckAlike(const std::string& name, const Part& first, const Part& other) const;
  bool LiesBefore(const Part& part, int32_t source) const;  // in the files
  // Sets type and transform of a tensor made from `part`, and adds the scales of one that is quantized.
  void Finish(const Part& part, ShardTensor tensor, std::vector<ShardTensor>& tensors) const;

  const PlanRequest& request_;
  const Architecture& architecture_;
  ConfigNumbers numbers_;
  const ModuleSet unquantized_;
  const DtypeInfo* const dtype_;  // null: whatever the checkpoint has

  std::vector<TensorRole> roles_;
  std::map<std::string, std::pair<const FusedRule*, size_t>, std::less<>> fused_;  // by key of a role
  int64_t layer_count_ = 0;
  int64_t mtp_layer_count_ = 0;
  int64_t expert_count_ = 0;        // 0: none
  std::vector<bool> tied_to_head_;  // by tensor: another name for it belongs to the last stage
};

}  // namespace weightbroker
