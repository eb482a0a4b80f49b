#include "client/src/host_memory.h"

#include <utility>

#include "client/src/verify.h"
#include "common/base/status_macros.h"

namespace weightbroker::client {

absl::Status HostMemory::Map(int fd, int64_t size_bytes) {
  ASSIGN_OR_RETURN(SlabMapping mapping, SlabMapping::Map(fd, size_bytes));
  views_.push_back(mapping.view());
  mappings_.push_back(std::move(mapping));
  return absl::OkStatus();
}

void HostMemory::Prefault(int threads) const {
  for (const SlabMapping& mapping : mappings_) mapping.Prefault(threads);
}

absl::Status HostMemory::Verify(const std::vector<Tensor>& tensors, int threads) const {
  return VerifyDigests(tensors, threads);
}

}  // namespace weightbroker::client
