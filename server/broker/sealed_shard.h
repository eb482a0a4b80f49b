// From what a loader hands over to a shard that can be served. The loader parses files that nobody vouches for, so
// nothing it says is taken on trust. Thread-safe: pure but for reading memfds.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"
#include "server/broker/placement.h"
#include "server/broker/shard.h"
#include "weightbroker/internal/v1/loader.pb.h"

namespace weightbroker {

// PROTOCOL_ERROR: "the loader ...".
absl::Status DistrustLoader(const std::string& what);

// What a shard on a GPU needs besides.
struct GpuShardParts {
  GpuFdCheck check_gpu_fd = CheckGpuMemoryFd;
  std::shared_ptr<const Exporter> exporter = nullptr;           // of CUDA_IPC
  std::shared_ptr<const PublisherProcess> publisher = nullptr;  // of a published one
};

// The shard of `place` in slabs of `kind`; `fds` are the slabs', where that kind has any, and then the manifest's.
// PROTOCOL_ERROR if descriptors, slabs and manifest are not what they are said to be.
absl::StatusOr<std::shared_ptr<const Shard>> ShardFromLoader(const internal::v1::LoadSealed& sealed,
                                                             std::vector<UniqueFd> fds, const RankPlacement& place,
                                                             v1::HandleKind kind, GpuShardParts gpu = {});

}  // namespace weightbroker
