#include "server/broker/object_views.h"

#include <utility>

namespace weightbroker {

ObjectGauges DescribeObjects(const std::vector<v1::WeightSet>& sets) {
  ObjectGauges objects;
  for (const v1::WeightSet& set : sets) {
    objects.loading_done_bytes += set.progress().done_bytes();
    objects.loading_size_bytes += set.progress().total_bytes();
    if (set.shards().empty()) continue;
    WeightSetGauges gauges{.fingerprint = set.fingerprint()};
    for (const v1::Shard& shard : set.shards()) {
      gauges.bytes += shard.size_bytes();
      gauges.tensors += shard.tensor_count();
      gauges.leases += shard.lease_count();
      DeviceGauges& device = objects.devices[shard.device()];
      device.resident_bytes += shard.size_bytes();
      device.resident_tensors += shard.tensor_count();
    }
    objects.weight_sets.push_back(std::move(gauges));
  }
  return objects;
}

void AddMachineFacts(const HealthFacts::Facts& facts, ObjectGauges* objects) {
  objects->machine_known = true;
  objects->host_available_bytes = facts.available_bytes;
  for (const v1::Device& device : facts.gpus.devices) {
    objects->gpus.push_back({.uuid = device.uuid(),
                             .name = device.name(),
                             .compute_capability = device.compute_capability(),
                             .driver_version = facts.gpus.driver_version,
                             .served = device.refusal().empty(),
                             .size_bytes = device.total_bytes(),
                             .free_bytes = device.free_bytes()});
  }
}

}  // namespace weightbroker
