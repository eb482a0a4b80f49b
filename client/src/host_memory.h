// A shard in host memory: sealed memfds, mapped read-only.
//
//   auto memory = std::make_unique<HostMemory>();
//   RETURN_IF_ERROR(memory->Map(fd, size_bytes));              // once for each slab, in their order
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "client/src/shard_memory.h"
#include "client/src/slab_mapping.h"

namespace weightbroker::client {

class HostMemory : public ShardMemory {
 public:
  // Adds a slab. Fails as SlabMapping::Map does. Not thread-safe.
  absl::Status Map(int fd, int64_t size_bytes);

  const Device& device() const override { return device_; }
  const std::vector<SlabView>& slabs() const override { return views_; }
  void Prefault(int threads) const override;
  absl::Status Verify(const std::vector<Tensor>& tensors, int threads) const override;

 private:
  const Device device_ = {};
  std::vector<SlabMapping> mappings_;
  std::vector<SlabView> views_;
};

}  // namespace weightbroker::client
