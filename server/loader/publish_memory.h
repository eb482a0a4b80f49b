// The memory that a publisher writes to, of whatever kind the request says, and what of it is handed over.
//
//   ASSIGN_OR_RETURN(const auto memory, PublishMemory::Create(request, open_cuda));
//   ASSIGN_OR_RETURN(const std::vector<FinishedSlab> slabs, memory->Add(sizes));         // MEMORY_EXHAUSTED
//   ... the publisher fills what they map ...
//   RETURN_IF_ERROR(memory->Seal());                                                     // STILL_WRITABLE
//   ASSIGN_OR_RETURN(const auto digests, memory->DigestsOf(rows));
//   ASSIGN_OR_RETURN(const std::vector<FinishedSlab> finished, memory->Finish());
//
// It gives everything back when it goes, but for what is still held elsewhere. Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/memory/digest.h"
#include "server/loader/load_memory.h"
#include "weightbroker/internal/v1/loader.pb.h"

namespace weightbroker {

class PublishMemory {
 public:
  // None yet. `open_cuda` is called only if the request's kind is a GPU's; then GPU_UNAVAILABLE, DRIVER_TOO_OLD,
  // DEVICE_UNKNOWN, DEVICE_UNSUPPORTED, MEMORY_EXHAUSTED, CUDA_ERROR.
  static absl::StatusOr<std::unique_ptr<PublishMemory>> Create(const internal::v1::LoadRequest& request,
                                                               const CudaOpener& open_cuda);
  virtual ~PublishMemory() = default;

  // Makes slabs of zeros of at least these lengths, all or, if it fails, none, and gives what maps them writable.
  virtual absl::StatusOr<std::vector<FinishedSlab>> Add(std::span<const int64_t> slab_bytes) = 0;

  // The lengths of all slabs, in the order of their making.
  virtual std::vector<int64_t> slab_bytes() const = 0;

  // How much of them has been written to, as far as the system says; 0 where it says nothing.
  virtual int64_t filled_bytes() const { return 0; }

  // Ends the writing as far as the kind allows: STILL_WRITABLE, with nothing changed, while somebody has host memory
  // mapped writable. What is on a GPU whoever has mapped it can go on writing to; only this process cannot. Harmless
  // twice.
  virtual absl::Status Seal() = 0;

  // The digest of each row, which lies inside the slabs. Only once it is sealed.
  virtual absl::StatusOr<std::vector<Digest>> DigestsOf(std::span<const v1::Tensor> rows) const = 0;

  // Everything, to be handed over. Called once.
  virtual absl::StatusOr<std::vector<FinishedSlab>> Finish() = 0;

  // Whether what has been handed over goes with this process.
  virtual bool needs_exporter() const { return false; }
};

// gpu_publish_memory.cc
absl::StatusOr<std::unique_ptr<PublishMemory>> PublishOnGpu(const internal::v1::LoadRequest& request, CudaDriver& cuda);

}  // namespace weightbroker
