// A shard in GPU memory, mapped into this process's address space of one GPU: read-only where the kind allows it, all
// slabs of it side by side in one reservation.
//
//   ASSIGN_OR_RETURN(const CudaContext context, CudaContext::Retain(*engine.driver, engine.device));
//   ASSIGN_OR_RETURN(auto memory, CudaMemory::Import(context, engine.uuid, slabs));     // {fd, size_bytes} each
//   memory->slabs()[0].data                                     // an address of the GPU, until `memory` goes
//
// What it maps outlives service, loader and descriptors: the driver keeps the memory for as long as it is mapped.
// The calling thread's current context is left as it was. Once the process has begun to exit nothing is given back any
// more: the driver may have been torn down by then, and the kernel does it in any case.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/src/shard_memory.h"
#include "common/device/cuda_context.h"
#include "common/memory/cuda_slab.h"

namespace weightbroker::client {

// What the service says of a slab, and how to get at it.
struct VmmSlab {
  int fd = -1;  // stays the caller's
  int64_t size_bytes = 0;
};
struct IpcSlab {
  CudaIpcHandle handle = {};
  int64_t size_bytes = 0;
};

// To be called before something is mapped that must not be given back once the process exits; IsExiting then says in
// time that it does.
void WatchForExit();
bool IsExiting();

// Until the GPU has done all that this process has asked of it in the context: unmapping does not wait for what still
// uses the memory. An error that the context has met already is its owner's to see.
void WaitForGpu(const CudaContext& context);

class CudaMemory : public ShardMemory {
 public:
  // Imports and maps slabs of kind CUDA_VMM_FD, read-only. DEVICE_MISMATCH if one lies on another GPU than the
  // context's, by what the imported memory itself says; CUDA_ERROR if a descriptor is none of GPU memory.
  static absl::StatusOr<std::unique_ptr<CudaMemory>> Import(const CudaContext& context, const std::string& uuid,
                                                            std::span<const VmmSlab> slabs);

  // Opens slabs of kind CUDA_IPC, which are writable: CUDA knows no other way. HANDLE_STALE if their exporter has
  // gone; PROTOCOL_ERROR if one is shorter than is said. Where they lie is for the caller to know, see CudaIpcMapping.
  static absl::StatusOr<std::unique_ptr<CudaMemory>> Open(const CudaContext& context, const std::string& uuid,
                                                          std::span<const IpcSlab> slabs);

  // What this process has mapped itself, its slabs of `slab_bytes` side by side in `range`: none if there are no slabs.
  static std::unique_ptr<CudaMemory> Take(const CudaContext& context, const std::string& uuid,
                                          std::optional<CudaReservation> range, const std::vector<int64_t>& slab_bytes);

  ~CudaMemory() override;
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  const Device& device() const override { return device_; }
  const std::vector<SlabView>& slabs() const override { return views_; }
  void Prefault(int /*threads*/) const override {}  // all of it is mapped already
  // On the GPU, at the speed of its memory; in a build without kernels by copying everything to the host.
  absl::Status Verify(const std::vector<Tensor>& tensors, int threads) const override;

 private:
  struct Mappings {
    explicit Mappings(CudaContext of) : context(std::move(of)) {}

    const CudaContext context;
    std::optional<CudaReservation> range;
    std::vector<CudaIpcMapping> opened;
  };

  CudaMemory(const CudaContext& context, const std::string& uuid);
  void AddView(CudaDevicePtr address, int64_t size_bytes);

  const Device device_;
  std::vector<SlabView> views_;
  std::unique_ptr<Mappings> mappings_;
};

}  // namespace weightbroker::client
