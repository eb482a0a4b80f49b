// Fills a shard's slabs from its files with large parallel reads, and digests every tensor on the way.
//
//   auto digests = LoadShard({.file_system = fs, .checkpoint = checkpoint, .identity = identity, .plan = plan}, slabs,
//                            options, [](int64_t done_bytes) { return Report(done_bytes); });
//   if (!digests.ok()) return digests.status();               // the slabs hold rubbish: drop them
//   RETURN_IF_ERROR(CheckUnchanged(fs, identity));            // nothing changed while it was read
//   SerializeManifest(plan, *digests)
//
// It knows nothing of processes or sockets.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/file.h"
#include "common/checkpoint/checkpoint.h"
#include "common/identity/checkpoint_identity.h"
#include "common/memory/digest.h"
#include "common/memory/host_slab.h"
#include "common/plan/plan.h"

namespace weightbroker {

// What is loaded. Everything must outlive the call.
struct LoadSource {
  FileSystem& file_system;
  const Checkpoint& checkpoint;
  const CheckpointIdentity& identity;
  const ShardPlan& plan;
};

// How bytes get into a slab: through its memfd, or by a copy into its mapping. HostSlab::PrefersWrite says which is
// best.
enum class FillMethod { kBest, kWrite, kCopy };

struct LoadOptions {
  int reader_threads = 0;         // 0 chooses by the number of cores
  int64_t chunk_bytes = 2 << 20;  // of each thread's buffer: a multiple of kDirectAlignmentBytes, at least twice it
  std::chrono::milliseconds progress_interval{100};
  FillMethod fill_method = FillMethod::kBest;  // another for tests and measurements
};

// Called on the caller's thread with the bytes done so far; an error ends the load with that error.
using LoadProgressCallback = std::function<absl::Status(int64_t done_bytes)>;

// Reads `source.plan` into `slabs`, which are as many and at least as long as the plan says, and returns the digest of
// each of the plan's tensors, in their order. Every file is checked against `source.identity` when it is opened:
// another file, or one that ends early, is CHECKPOINT_CHANGED naming it. A change that does not make reading fail is
// for CheckUnchanged to find afterwards. MEMORY_EXHAUSTED if the slabs' pages cannot be had. No thread is left when it
// returns.
absl::StatusOr<std::vector<Digest>> LoadShard(const LoadSource& source, std::span<HostSlab> slabs,
                                              const LoadOptions& options, const LoadProgressCallback& progress);

}  // namespace weightbroker
