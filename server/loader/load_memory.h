// The memory that a load fills, of whatever kind the request says, and what of it is handed over.
//
//   const auto memory = LoadMemory::Make(request, open_cuda);                      // takes nothing yet
//   ASSIGN_OR_RETURN(const auto load, PreparedLoad::Create(source, memory->Tune(options)));
//   RETURN_IF_ERROR(memory->Allocate(plan, *load));                                // MEMORY_EXHAUSTED, ...
//   ASSIGN_OR_RETURN(auto digests, load->Run(memory->destinations(), progress));
//   ASSIGN_OR_RETURN(const std::vector<FinishedSlab> slabs, memory->Finish(0));   // no writer of ours is left
//
// It gives everything back when it goes, but for what has been finished and is still held elsewhere. Not thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"
#include "common/device/cuda_driver.h"
#include "common/load/load_engine.h"
#include "common/plan/plan.h"
#include "weightbroker/internal/v1/loader.pb.h"

namespace weightbroker {

// A slab that nobody writes to any more, as it is handed over.
struct FinishedSlab {
  v1::Slab description;
  UniqueFd fd;  // invalid for CUDA_IPC, whose handle is in the description
};

using CudaOpener = std::function<absl::StatusOr<CudaDriver*>()>;

// Whether the request is for host memory.
bool IsForHost(const internal::v1::LoadRequest& request);

class LoadMemory {
 public:
  // Memory on the devices of the request's ranks, which must outlive it. `open_cuda` is called by Allocate, and only if
  // a GPU is needed.
  static std::unique_ptr<LoadMemory> Make(const internal::v1::LoadRequest& request, const CudaOpener& open_cuda);
  virtual ~LoadMemory() = default;

  // Takes memory for each of the plan's shards, which are in the order of the request's ranks, all zeros, and for the
  // buffers of `load`. MEMORY_EXHAUSTED naming the device, need, have and who uses it; GPU_UNAVAILABLE, DRIVER_TOO_OLD,
  // DEVICE_UNKNOWN, DEVICE_UNSUPPORTED or CUDA_ERROR for GPUs. Both must outlive this object. Once.
  virtual absl::Status Allocate(const NodePlan& plan, const PreparedLoad& load) = 0;

  // One for each shard.
  std::span<const std::unique_ptr<Destination>> destinations() const { return destinations_; }

  // `options` as they suit this memory, where they leave it open.
  virtual LoadOptions Tune(LoadOptions options) { return options; }

  // How much of the read buffers that Tune gave could be pinned, and how much should have been and could not.
  virtual int64_t pinned_bytes() const { return 0; }
  virtual int64_t unpinned_bytes() const { return 0; }

  // When every GPU's context was there, in nanoseconds of the steady clock; 0 without GPUs.
  virtual int64_t contexts_ns() const { return 0; }

  // Ends the writing to one shard, once all have been loaded. It stays ours to look at, until this object goes.
  virtual absl::StatusOr<std::vector<FinishedSlab>> Finish(size_t shard) = 0;

  // Whether what has been finished goes with this process.
  virtual bool needs_exporter() const { return false; }

  // Gives back what only loading needed, in a process that stays. Nothing is loaded after it.
  virtual void FreeWorkingMemory() {}

 protected:
  std::vector<std::unique_ptr<Destination>> destinations_;
};

// gpu_load_memory.cc
std::unique_ptr<LoadMemory> MakeGpuLoadMemory(const internal::v1::LoadRequest& request, CudaOpener open_cuda);

}  // namespace weightbroker
