// Where a load puts one rank's bytes: host memory, or a device's. The engine reads files and cuts what it has read into
// transfers; a destination makes them happen, and digests what has landed.
//
//   for each chunk that was read, on any thread:
//     RETURN_IF_ERROR(destination.Store(chunk, transfers));    // may return before it is done
//     ...
//     RETURN_IF_ERROR(destination.Release(chunk));             // the chunk's memory may be used again
//   at the end, on one thread:
//     ASSIGN_OR_RETURN(auto digests, destination.Finish());
//
// Store and Release are thread-safe for different chunks and transfers that land in different elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/memory/digest.h"
#include "common/plan/plan.h"

namespace weightbroker {

// The part of a Piece whose source bytes are in one chunk. Strides and offsets are those of Piece, but for the
// source's, which are in bytes of the chunk. A run of the piece may be cut between two elements, in the middle of a
// chunk's boundary; with kQuantizeFp8Block a transfer has whole rows and whole rows of blocks, but for a matrix's last
// ones.
struct Transfer {
  int32_t tensor = 0;  // into ShardPlan::tensors
  Transform transform = Transform::kCopy;
  const DtypeInfo* source_dtype = nullptr;
  int64_t run_elements = 0;
  int64_t run_count = 1;
  int64_t source_offset_bytes = 0;  // from the chunk's start
  int64_t source_stride_bytes = 0;
  int64_t offset = 0;  // elements of the tensor
  int64_t stride = 0;
  int64_t element_stride = 1;
  int64_t scale_offset = 0;  // elements of the scale tensor
  int64_t scale_stride = 0;
};

class Destination {
 public:
  virtual ~Destination() = default;

  // Does `transfers`, whose sources lie in `chunk`. WEIGHT_NOT_FINITE naming the tensor for a NaN or an infinity that
  // is to be quantized; it may come from Store, Release or Finish.
  virtual absl::Status Store(std::span<const std::byte> chunk, std::span<const Transfer> transfers) = 0;

  // Waits until nothing that was stored from memory within `chunk` needs it any more.
  virtual absl::Status Release(std::span<const std::byte> chunk) = 0;

  // Waits until everything has landed and returns the digest of each of the plan's tensors, in their order, aliases
  // included. Nothing is stored after it.
  virtual absl::StatusOr<std::vector<Digest>> Finish() = 0;
};

// Where the engine's read buffers come from, so that a device's can be pinned.
class BufferSource {
 public:
  virtual ~BufferSource() = default;

  // Memory that starts at a multiple of kDirectAlignmentBytes and is valid until this object goes. MEMORY_EXHAUSTED if
  // there is none. Thread-safe.
  virtual absl::StatusOr<std::span<std::byte>> Allocate(int64_t size_bytes) = 0;

  // How many chunks of a reader thread may still be needed after Store has returned: 0 where Store is done by then.
  virtual int chunks_in_flight() const { return 0; }
};

}  // namespace weightbroker
