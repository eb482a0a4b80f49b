#include "tests/integration/chaos/holdings.h"

#include <filesystem>

#include "tests/integration/survival/survival.h"

namespace weightbroker::testing {
namespace {

constexpr int64_t kDriverKeepsBytes = 16 << 20;

int CountDescriptors(pid_t pid) {
  std::error_code error;
  const std::filesystem::directory_iterator fds("/proc/" + std::to_string(pid) + "/fd", error);
  return static_cast<int>(std::distance(begin(fds), end(fds)));
}

}  // namespace

bool Holdings::IsBackTo(const Holdings& before) const {
  return memfds == before.memfds && bytes == before.bytes && keeper_descriptors <= before.keeper_descriptors &&
         broker_descriptors <= before.broker_descriptors && gpu_used_bytes >= 0 && before.gpu_used_bytes >= 0 &&
         gpu_used_bytes <= before.gpu_used_bytes + kDriverKeepsBytes;
}

std::string Holdings::ToString() const {
  return std::to_string(memfds) + " memfds, " + std::to_string(keeper_descriptors) + " and " +
         std::to_string(broker_descriptors) + " descriptors, " + std::to_string(bytes) + " bytes, and of the GPU " +
         std::to_string(gpu_used_bytes);
}

Holdings TakeHoldings(const Service& service, GpuInventory* inventory, const std::string& gpu_uuid) {
  Holdings held;
  held.memfds = service.CountMemfds();
  held.keeper_descriptors = CountDescriptors(service.Processes()[0]);
  held.broker_descriptors = CountDescriptors(BrokerOf(service));
  if (inventory != nullptr) {
    const auto memory = inventory->Memory(gpu_uuid);
    held.gpu_used_bytes = memory.ok() ? memory->total_bytes - memory->free_bytes : -1;
  }
  const auto health = service.Health();
  if (!health.ok()) return held;
  for (const auto& set : health->weight_sets()) {
    for (const auto& shard : set.shards()) held.bytes += shard.size_bytes();
  }
  return held;
}

}  // namespace weightbroker::testing
