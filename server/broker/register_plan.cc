#include "server/broker/register_plan.h"

#include <map>
#include <string>

#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/plan/engine_layout.h"

namespace weightbroker {
namespace {

void WriteDevices(const RoomPlan& room, const MemoryPlan& memory, v1::RegisterPlan* plan) {
  std::map<std::string, int64_t> tensors;
  for (const ShardMemory& shard : memory.shards) tensors[shard.device] += shard.tensor_count;
  for (const DeviceRoom& there : room.devices) {
    v1::DevicePlan& device = *plan->add_devices();
    device.set_device(there.device);
    device.set_need_bytes(there.need_bytes);
    device.set_have_bytes(there.have_bytes);
    device.set_limited_by(there.limited_by);
    device.set_reserved_bytes(there.reserved_bytes);
    device.set_evictable_bytes(there.evictable_bytes);
    device.set_tensor_count(tensors[there.device]);
  }
}

void WriteEvictions(const RoomPlan& room, v1::RegisterPlan* plan) {
  for (const v1::WeightSet& set : room.evictions) {
    v1::PlannedEviction& eviction = *plan->add_evictions();
    eviction.set_fingerprint(set.fingerprint());
    eviction.set_model(set.spec().model());
    *eviction.mutable_last_use_time() = set.last_use_time();
    for (const v1::Shard& shard : set.shards()) eviction.set_size_bytes(eviction.size_bytes() + shard.size_bytes());
  }
}

// Whether a Register would find the set.
absl::StatusOr<bool> IsPresent(const Registry& registry, const std::string& fingerprint) {
  const WeightSetRef set = registry.Find(fingerprint);
  if (set == nullptr) return false;
  RETURN_IF_ERROR(registry.CheckNotDraining(set));
  const v1::WeightSetState state = registry.View(set).state;
  return state != v1::WEIGHT_SET_STATE_FAILED && state != v1::WEIGHT_SET_STATE_DRAINING;
}

}  // namespace

absl::StatusOr<v1::RegisterPlan> MakeRegisterPlan(const ServiceContext& context, const NewWeightSet& wanted) {
  v1::RegisterPlan plan;
  plan.set_fingerprint(wanted.fingerprint.hash);
  ASSIGN_OR_RETURN(const bool is_present, IsPresent(*context.registry, wanted.fingerprint.hash));
  if (is_present) {
    plan.set_present(true);
    plan.set_fits(true);
    return plan;
  }
  if (IsEngineLayout(wanted.spec)) {
    return MakeError(Reason::kInvalidArgument,
                     "a set with layout \"engine\" is published by its engine, which alone knows what it needs: there "
                     "is no dry run of it",
                     {{"field", "dry_run"}});
  }
  ASSIGN_OR_RETURN(const MemoryPlan memory, context.loads->Plan(wanted));
  ASSIGN_OR_RETURN(const RoomPlan room, context.registry->PlanRoom(memory));
  plan.set_fits(room.fits);
  plan.set_read_bytes(memory.read_bytes);
  WriteDevices(room, memory, &plan);
  WriteEvictions(room, &plan);
  return plan;
}

}  // namespace weightbroker
