// Where the bytes of a load land, behind an interface: host memory or GPUs. Whoever reads the files knows neither.
//
//   auto writer = destination.NewWriter(chunk_bytes);            // one for each reader thread, used by it alone
//   while (...) {
//     ASSIGN_OR_RETURN(const auto buffer, (*writer)->NextBuffer());
//     ... read a chunk of a file into it ...
//     RETURN_IF_ERROR((*writer)->Write(pieces));                 // of that chunk; may go on in the background
//   }
//   RETURN_IF_ERROR((*writer)->Flush());
//   ... once every writer has been flushed and destroyed ...
//   ASSIGN_OR_RETURN(const auto digests, destination.Finish());
//
// One chunk may go to several shards: each byte of a file is read once, however many ranks want it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/memory/digest.h"

namespace weightbroker {

// A run of bytes of one tensor, and its place.
struct LoadPiece {
  int32_t shard = 0;                // index into what the destination was made with
  int32_t tensor = 0;               // index into the shard's plan
  int64_t tensor_offset_bytes = 0;  // of the tensor as it is in the shard; a multiple of kDigestWordBytes
  int32_t slab = 0;
  int64_t slab_offset_bytes = 0;
  std::span<const std::byte> bytes;  // in the buffer that NextBuffer gave last
};

// One reader thread's way to a destination. Not thread-safe.
class LoadWriter {
 public:
  virtual ~LoadWriter() = default;

  // A buffer of `chunk_bytes`, aligned to kDirectAlignmentBytes. Waits until what was written from it before has left
  // it.
  virtual absl::StatusOr<std::span<std::byte>> NextBuffer() = 0;

  // Puts the pieces in their places, in their order, or begins to. No byte is written twice by all writers together.
  virtual absl::Status Write(std::span<const LoadPiece> pieces) = 0;

  // Waits until everything has left the buffers.
  virtual absl::Status Flush() = 0;
};

class LoadDestination {
 public:
  virtual ~LoadDestination() = default;

  // `chunk_bytes` is a multiple of kDirectAlignmentBytes. Thread-safe.
  virtual absl::StatusOr<std::unique_ptr<LoadWriter>> NewWriter(int64_t chunk_bytes) = 0;

  // Everything has been written: the digest of each tensor, by shard and the tensor's index in its plan; of an alias,
  // that of its target. Everything is in place when it returns, for any process that maps it.
  virtual absl::StatusOr<std::vector<std::vector<Digest>>> Finish() = 0;
};

}  // namespace weightbroker
