// The slabs that a publisher may write to, mapped into this process, wherever they lie.
//
//   ASSIGN_OR_RETURN(const auto memory, WritableMemory::Open(engine));
//   RETURN_IF_ERROR(memory->Add(slabs, fds));                          // grant.slabs(), and what its ticket stands for
//   RETURN_IF_ERROR(memory->Copy(memory->slabs()[0].data, from, size_bytes));
//   RETURN_IF_ERROR(memory->Synchronize());                            // before Commit
//
// Unmapped when it goes, but on a GPU once the process has begun to exit: see cuda_memory.h. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/engine_device.h"
#include "common/base/unique_fd.h"
#include "weightbroker/device.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker::client {

// On a GPU `data` is an address of the device.
struct WritableView {
  std::byte* data = nullptr;
  int64_t size_bytes = 0;
};

class WritableMemory {
 public:
  // None yet, to be mapped where the engine computes. CUDA_ERROR, MEMORY_EXHAUSTED for a GPU's context.
  static absl::StatusOr<std::unique_ptr<WritableMemory>> Open(const EngineDevice& engine);
  virtual ~WritableMemory() = default;

  // Maps `slabs`, for which `fds` are those that they have: one each, or none of kind CUDA_IPC. All or, if it fails,
  // none. PROTOCOL_ERROR if they are not what they must be, DEVICE_MISMATCH if memory of kind CUDA_VMM_FD says that
  // it lies elsewhere than the engine computes, HANDLE_STALE, SYSTEM_ERROR, CUDA_ERROR.
  virtual absl::Status Add(std::span<const v1::Slab> slabs, std::span<const UniqueFd> fds) = 0;

  // In the order in which they were added.
  const std::vector<WritableView>& slabs() const { return slabs_; }

  virtual Device device() const { return {}; }

  // Copies into a slab. On a GPU `from` may be an address of a GPU, whose copy is only queued, or of host memory, which
  // has been read when it returns.
  virtual absl::Status Copy(std::byte* to, const void* from, int64_t size_bytes) = 0;

  // Where copies are queued from then on: a CUstream of the GPU, null for the default one. Ignored on the host.
  virtual void UseStream(void* /*stream*/) {}

  // Waits until all that has been written, by Copy and by whatever else this process has queued, is there.
  virtual absl::Status Synchronize() { return absl::OkStatus(); }

 protected:
  std::vector<WritableView> slabs_;
};

// gpu_writable_memory.cc
absl::StatusOr<std::unique_ptr<WritableMemory>> OpenGpuWritableMemory(const EngineDevice& engine);

}  // namespace weightbroker::client
