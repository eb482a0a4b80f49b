// The memory of a shard, mapped into this process, wherever it lies: see host_memory.h and cuda_memory.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "weightbroker/device.h"
#include "weightbroker/tensor.h"

namespace weightbroker::client {

// One slab. On a GPU `data` is an address of the device.
struct SlabView {
  const std::byte* data = nullptr;
  int64_t size_bytes = 0;
};

// Unmapped when it is destroyed. Immutable, so thread-safe.
class ShardMemory {
 public:
  virtual ~ShardMemory() = default;

  virtual const Device& device() const = 0;

  // In the order of the shard's slabs.
  virtual const std::vector<SlabView>& slabs() const = 0;

  // Makes every page be there before it is touched, with `threads` threads. Best effort.
  virtual void Prefault(int threads) const = 0;

  // Compares tensors of this memory with the digests that their manifest states, reading every byte, with `threads`
  // (> 0) threads where the host reads. DIGEST_MISMATCH names the first tensor, by name, that differs.
  virtual absl::Status Verify(const std::vector<Tensor>& tensors, int threads) const = 0;
};

}  // namespace weightbroker::client
