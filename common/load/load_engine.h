// Fills the shards of a node from their files with large parallel reads, each byte read once however many ranks want
// it, and digests every tensor on the way.
//
//   const LoadSource source{.file_system = fs, .checkpoint = checkpoint, .identity = identity, .plan = plan};
//   ASSIGN_OR_RETURN(const auto load, PreparedLoad::Create(source, options));     // nothing has been read yet
//   std::vector<std::unique_ptr<Destination>> ranks = ...;                        // one for each of plan.shards
//   auto digests = load->Run(ranks, [](int64_t done_bytes) { return Report(done_bytes); });
//   if (!digests.ok()) return digests.status();               // what the destinations hold is rubbish: drop it
//   RETURN_IF_ERROR(CheckUnchanged(fs, identity));            // nothing changed while it was read
//   for (size_t i = 0; i < ranks.size(); ++i) SerializeManifest(plan.shards[i], (*digests)[i]);
//
// It knows nothing of processes or sockets.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/file.h"
#include "common/checkpoint/checkpoint.h"
#include "common/identity/checkpoint_identity.h"
#include "common/load/destination.h"
#include "common/memory/digest.h"
#include "common/memory/host_slab.h"
#include "common/plan/plan.h"

namespace weightbroker {

// What is loaded. Everything must outlive the call.
struct LoadSource {
  FileSystem& file_system;
  const Checkpoint& checkpoint;
  const CheckpointIdentity& identity;
  const NodePlan& plan;
};

// How reads are made: by io_uring, several of a thread under way at once, or by pread, each waited for. kAuto is
// io_uring where it is to be had and pread elsewhere, with a line in the log; kIoUring fails there. What the page cache
// holds is always read by pread.
enum class ReadMethod { kAuto, kIoUring, kPread };

// What a load came to use, and how long it took.
struct LoadReport {
  ReadMethod read_method = ReadMethod::kPread;  // never kAuto
  int reader_threads = 0;
  int reads_per_thread = 0;                 // under way at once
  int64_t buffer_bytes = 0;                 // of one
  int64_t buffers_bytes = 0;                // of all that there may be
  int64_t direct_bytes = 0;                 // what was read past the page cache, of whole blocks
  int storage_reads = 0;                    // that went there at once, in the end: see read_depth.h; 0 if none did
  std::chrono::nanoseconds read_time{0};    // until everything had been read and stored
  std::chrono::nanoseconds digest_time{0};  // what the destinations' Finish took after it
};

// Of one read, where it is left open: from storage, and where memory has all of the files. The virtual disks of
// machines with an H200 were read with 0.75 and 0.82 of what they have by four reads of 2 MiB, with 1.01 and 1.02 by
// four of 1; from the page cache a write to host memory should fill a huge page.
inline constexpr int64_t kStorageChunkBytes = 1 << 20;
inline constexpr int64_t kMemoryChunkBytes = 2 << 20;

struct LoadOptions {
  ReadMethod read_method = ReadMethod::kAuto;
  int reader_threads = 0;    // 0 chooses by the number of cores
  int reads_per_thread = 0;  // with io_uring; 0 chooses
  int64_t chunk_bytes = 0;   // of one read: a multiple of kDirectAlignmentBytes, at least twice it; 0 chooses. Tensors
                             // that are quantized are read by whole rows of blocks, in chunks as large as that takes.
  int64_t memory_chunk_bytes = kMemoryChunkBytes;  // the same, where memory has all of the files
  int64_t max_buffers_bytes = 512 << 20;  // of all buffers together, but for those that one thread cannot do without
  std::chrono::milliseconds progress_interval{100};
  BufferSource* buffers = nullptr;  // null: ordinary memory. Outlives the call.
  LoadReport* report = nullptr;     // filled if it is not null
};

// Called on the caller's thread with the bytes done so far, of plan.read_bytes; an error ends the load with that error.
using LoadProgressCallback = std::function<absl::Status(int64_t done_bytes)>;

using NodeDigests = std::vector<std::vector<Digest>>;  // for each shard, of each of its tensors, in their order

// A load of which everything has been decided. Not thread-safe.
class PreparedLoad {
 public:
  // Opens the files, each of which is checked against `source.identity`: another one is CHECKPOINT_CHANGED naming it.
  // SYSTEM_ERROR if io_uring must be used and may not. What `options` points to must outlive the result.
  static absl::StatusOr<std::unique_ptr<PreparedLoad>> Create(const LoadSource& source, const LoadOptions& options);
  virtual ~PreparedLoad() = default;

  // At most how many buffers Run will want of `options.buffers`, of what size.
  virtual int buffer_count() const = 0;
  virtual int64_t buffer_bytes() const = 0;

  // Reads what the plan says into `destinations`, one for each of its shards. Once. A file that ends early is
  // CHECKPOINT_CHANGED naming it; a change that does not make reading fail is for CheckUnchanged to find afterwards.
  // Otherwise it fails as its destinations do. No thread is left when it returns.
  virtual absl::StatusOr<NodeDigests> Run(std::span<const std::unique_ptr<Destination>> destinations,
                                          const LoadProgressCallback& progress) = 0;
};

// Both at once.
absl::StatusOr<NodeDigests> LoadNode(const LoadSource& source,
                                     std::span<const std::unique_ptr<Destination>> destinations,
                                     const LoadOptions& options, const LoadProgressCallback& progress);

}  // namespace weightbroker
