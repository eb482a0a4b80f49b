// A slab in host memory, mapped read-only into this process. Move-only; unmaps when destroyed; immutable, so
// thread-safe.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/shard_memory.h"

namespace weightbroker::client {

class SlabMapping {
 public:
  // Maps the first `size_bytes` (> 0) of `fd`, which stays the caller's. PROTOCOL_ERROR unless it is a memfd that
  // nobody can shrink and that is that long: a shorter one would end the engine with SIGBUS on some later read.
  static absl::StatusOr<SlabMapping> Map(int fd, int64_t size_bytes);

  SlabMapping(SlabMapping&& other) noexcept;
  SlabMapping& operator=(SlabMapping&& other) noexcept;
  ~SlabMapping();

  SlabView view() const { return {data_, size_bytes_}; }

  // Maps every page now, with `threads` threads. Best effort: pages that are not mapped here are mapped on first touch.
  void Prefault(int threads) const;

 private:
  SlabMapping(const std::byte* data, int64_t size_bytes) : data_(data), size_bytes_(size_bytes) {}
  void Unmap();

  const std::byte* data_ = nullptr;
  int64_t size_bytes_ = 0;
};

// `requested`, or one for each processor this process may run on, at most 16.
int ChooseThreads(int requested);

}  // namespace weightbroker::client
