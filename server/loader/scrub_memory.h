// The memory of a resident shard as a scrub reads it, of whatever kind: mapped read-only where the kind allows it.
//
//   ASSIGN_OR_RETURN(const auto memory, ScrubMemory::Map(request, fds, open_cuda));
//   ASSIGN_OR_RETURN(const Digest found, memory->DigestOf(row, on_read));
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"
#include "common/memory/digest.h"
#include "server/loader/load_memory.h"
#include "weightbroker/internal/v1/loader.pb.h"

namespace weightbroker {

class ScrubMemory {
 public:
  // Of a request with `scrub`; `fds` are the slabs', where their kind has any. `open_cuda` is called only for a GPU's.
  // PROTOCOL_ERROR if there are more or fewer, or a memfd is not as long as is said; SYSTEM_ERROR; or as importing GPU
  // memory fails.
  static absl::StatusOr<std::unique_ptr<ScrubMemory>> Map(const internal::v1::LoadRequest& request,
                                                          std::span<const UniqueFd> fds, const CudaOpener& open_cuda);
  virtual ~ScrubMemory() = default;

  // The digest of a row, which lies inside its slab. `on_read` is called with the length of each piece that has been
  // read; what it fails with comes back.
  using OnRead = std::function<absl::Status(int64_t bytes)>;
  virtual absl::StatusOr<Digest> DigestOf(const v1::Tensor& row, const OnRead& on_read) = 0;
};

// gpu_scrub_memory.cc
absl::StatusOr<std::unique_ptr<ScrubMemory>> MapGpuForScrub(const internal::v1::LoadRequest& request,
                                                            std::span<const UniqueFd> fds, CudaDriver& cuda);

}  // namespace weightbroker
