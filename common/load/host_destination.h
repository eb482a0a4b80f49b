// A rank's shard in host memory, as a load fills it.
//
//   auto destination = MakeHostDestination(plan.shards[0], slabs, FillMethod::kBest);
//
// The slabs are still the caller's, to be sealed when the load is done.
#pragma once

#include <memory>
#include <span>

#include "common/load/destination.h"
#include "common/memory/host_slab.h"

namespace weightbroker {

// How bytes get into a slab: through its memfd, or by a copy into its mapping. HostSlab::PrefersWrite says which is
// best; what is not copied in long runs goes into the mapping either way.
enum class FillMethod { kBest, kWrite, kCopy };

// `slabs` are as many and at least as long as `plan` says, and all zeros; both outlive the result. Store fails with
// MEMORY_EXHAUSTED if the slabs' pages cannot be had.
std::unique_ptr<Destination> MakeHostDestination(const ShardPlan& plan, std::span<HostSlab> slabs,
                                                 FillMethod fill_method = FillMethod::kBest);

}  // namespace weightbroker
