// Weight sets that become resident without a loader, for tests of what is done with them.
//
//   NewWeightSet wanted;
//   wanted.fingerprint.hash = Hash("aa");
//   const WeightSetRef set = registry->Begin(std::move(wanted)).value().set;
//   FinishLoad(*registry, set, 4096);
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/broker/registry.h"
#include "tests/support/status_matchers.h"

namespace weightbroker::testing {

// A fingerprint that begins with `start`.
inline std::string Hash(const std::string& start) { return start + std::string(64 - start.size(), '0'); }

// The shard of one rank, which has no memory.
inline std::shared_ptr<const Shard> ShardAt(const RankPlacement& placed, int64_t size_bytes) {
  auto shard = std::make_shared<Shard>();
  shard->rank = placed.rank;
  shard->device = placed.device;
  shard->size_bytes = size_bytes;
  v1::Slab slab;
  slab.set_size_bytes(size_bytes);
  shard->slabs.push_back(slab);
  shard->slab_fds = std::make_shared<const std::vector<UniqueFd>>();
  return shard;
}

// Makes a set resident whose load has begun, with `size_bytes` for each of its ranks.
inline void FinishLoad(Registry& registry, const WeightSetRef& set, int64_t size_bytes) {
  MemoryPlan plan{.shards = {}, .read_bytes = size_bytes};
  std::vector<std::shared_ptr<const Shard>> shards;
  for (const RankPlacement& placed : set->placement().ranks) {
    plan.shards.push_back({placed.rank, placed.device, size_bytes, 1});
    shards.push_back(ShardAt(placed, size_bytes));
  }
  EXPECT_THAT(registry.GrantMemory(set, plan), IsOk());
  EXPECT_THAT(registry.MakeResident(set, std::move(shards), size_bytes), IsOk());
}

}  // namespace weightbroker::testing
