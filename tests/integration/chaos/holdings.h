// What the service holds at a moment: what it holds while nobody uses it must be the same before and after.
//
//   const Holdings before = TakeHoldings(service, nullptr, "");
//   ... chaos ...
//   EXPECT_TRUE(TakeHoldings(service, nullptr, "").IsBackTo(before));
#pragma once

#include <cstdint>
#include <string>

#include "common/device/gpu_inventory.h"
#include "tests/integration/service.h"

namespace weightbroker::testing {

struct Holdings {
  int memfds = 0;
  int keeper_descriptors = 0;
  int broker_descriptors = 0;
  int64_t bytes = 0;           // of all shards, as Health has them
  int64_t gpu_used_bytes = 0;  // by whoever it be, or -1 if it cannot be seen; the driver may keep some of its own

  bool IsBackTo(const Holdings& before) const;
  std::string ToString() const;
};

// `inventory` is null where no GPU is looked at.
Holdings TakeHoldings(const Service& service, GpuInventory* inventory, const std::string& gpu_uuid);

}  // namespace weightbroker::testing
