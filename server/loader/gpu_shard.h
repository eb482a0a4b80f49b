// One shard's slabs in GPU memory, of either kind, mapped to be written; what a load or a publisher fills.
//
//   ASSIGN_OR_RETURN(auto shard, GpuShard::Create(context, uuid, v1::HANDLE_KIND_CUDA_VMM_FD));
//   RETURN_IF_ERROR(shard->Add({bytes}));                          // MEMORY_EXHAUSTED: need, have
//   ... fill shard->slabs()[0].address ...
//   RETURN_IF_ERROR(shard->Protect());
//   ASSIGN_OR_RETURN(const std::vector<FinishedSlab> finished, shard->Finish());
//
// It gives everything back when it goes, but for what is held elsewhere by then. Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/device/cuda_context.h"
#include "common/device/gpu_digest.h"
#include "server/loader/load_memory.h"

namespace weightbroker {

class GpuShard {
 public:
  using Slab = GpuRange;  // its size is rounded up

  // Without slabs yet, on the context's GPU, whose UUID is `uuid`. DEVICE_UNSUPPORTED if the GPU has no such memory.
  static absl::StatusOr<std::unique_ptr<GpuShard>> Create(const CudaContext& context, const std::string& uuid,
                                                          v1::HandleKind kind);
  virtual ~GpuShard() = default;

  // Adds slabs at least as long as `slab_bytes` (each > 0) say: full of zeros, or of whatever the memory held. All of
  // them or, if it fails, none.
  absl::Status Add(std::span<const int64_t> slab_bytes);
  absl::Status AddUncleared(std::span<const int64_t> slab_bytes);

  // Takes back what the last Add has added. Only once for each.
  void UndoAdd();

  // All there are, in the order of their making.
  const std::vector<Slab>& slabs() const { return slabs_; }
  const CudaContext& context() const { return context_; }

  // A slab as another process can map it now: writable.
  absl::StatusOr<FinishedSlab> Share(size_t slab) const;

  // Everything has been written: takes this process's right to write away as far as the kind allows.
  virtual absl::Status Protect() = 0;

  // All slabs as they are handed over, after Protect. They stay mapped, as Protect has left them: unmapping 30 GiB
  // takes 14 ms, for which nobody need wait.
  absl::StatusOr<std::vector<FinishedSlab>> Finish() const;

  // Whether what has been handed over goes with this process.
  virtual bool needs_exporter() const = 0;

 protected:
  GpuShard(CudaContext context, std::string uuid) : context_(std::move(context)), uuid_(std::move(uuid)) {}

  // Makes slabs with unknown contents, and mappings of them.
  virtual absl::StatusOr<std::vector<Slab>> Allocate(std::span<const int64_t> slab_bytes) = 0;
  // Lets go of all but the first `count` slabs.
  virtual void Shrink(size_t count) = 0;
  // Fills in the kind and the handle.
  virtual absl::Status Export(size_t slab, FinishedSlab* finished) const = 0;

 private:
  absl::Status FillWithZeros(std::span<const Slab> slabs) const;

  const CudaContext context_;
  const std::string uuid_;
  std::vector<Slab> slabs_;
  size_t before_last_add_ = 0;
};

// The context of the GPU with that UUID. DEVICE_UNKNOWN, DEVICE_UNSUPPORTED, CUDA_ERROR.
absl::StatusOr<CudaContext> ContextOfGpu(CudaDriver& cuda, const std::string& uuid);

// `error`, and if it says that memory has run out also who uses the GPU besides, where NVML knows.
absl::Status WithHolders(const absl::Status& error, const std::string& uuid);

}  // namespace weightbroker
