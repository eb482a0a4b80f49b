// GPU memory that holds tensors of one shard, in the two kinds that other processes can map. It knows nothing of
// tensors: see plan/manifest.h.
//
// CUDA_VMM_FD: physical memory with a descriptor. Whoever holds the descriptor keeps the memory, with or without CUDA.
//
//   auto memory = CudaVmmMemory::Create(context, bytes);
//   if (!memory.ok()) return memory.status();                    // MEMORY_EXHAUSTED: need and have
//   ASSIGN_OR_RETURN(auto range, CudaReservation::Reserve(context, memory->size_bytes()));
//   RETURN_IF_ERROR(range.Map(0, *memory, CudaAccess::kReadWrite));
//   ... fill range.address() ...
//   ASSIGN_OR_RETURN(UniqueFd fd, memory->Export());
//
// and elsewhere, with what Export of the service says of the slab:
//
//   ASSIGN_OR_RETURN(auto memory, CudaVmmMemory::Import(context, fd, slab.size_bytes()));   // DEVICE_MISMATCH
//   RETURN_IF_ERROR(range.Map(offset, memory, CudaAccess::kRead));
//
// CUDA_IPC: cudaMalloc's memory, with a handle of 64 bytes. It goes when its maker's process does, but for those who
// have mapped it by then.
//
//   ASSIGN_OR_RETURN(auto memory, CudaIpcMemory::Allocate(context, bytes));
//   ASSIGN_OR_RETURN(const CudaIpcHandle handle, memory.Export());
//   ASSIGN_OR_RETURN(auto mapping, CudaIpcMapping::Open(context, handle, bytes));   // HANDLE_STALE: its maker has gone
//
// All are move-only, hold the context, and leave the calling thread's current one as it was. Not thread-safe, but
// different objects may be used by different threads.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"
#include "common/device/cuda_context.h"

namespace weightbroker {

// What cudaMalloc's allocations are rounded up to, so that each has address ranges of its own to hand out.
inline constexpr int64_t kCudaIpcGranularityBytes = 2 << 20;

// Ok if the driver on this device can export memory as descriptors; DEVICE_UNSUPPORTED saying what it lacks.
absl::Status CheckCudaVmmSupport(CudaDriver& driver, CudaDevice device);

// What `size_bytes` of VMM memory on the device come to: rounded up to its granularity, 2 MiB on today's GPUs.
absl::StatusOr<int64_t> CudaVmmSizeBytes(CudaDriver& driver, CudaDevice device, int64_t size_bytes);

// A handle to physical memory. The memory goes with the last of handles, mappings and descriptors.
class CudaVmmMemory {
 public:
  // Takes `size_bytes` (> 0, rounded up as CudaVmmSizeBytes does) on the context's device, with unknown contents.
  // MEMORY_EXHAUSTED naming need and have; CUDA_ERROR if the driver refuses, saying what may be the cause.
  static absl::StatusOr<CudaVmmMemory> Create(const CudaContext& context, int64_t size_bytes);

  // Takes what another process exported. `fd` stays the caller's, and may be closed afterwards. `size_bytes` is what
  // its maker says that it has. DEVICE_MISMATCH if it lies on another device than the context's, naming both UUIDs, or
  // on one that this process does not see: the driver would map it silently, over NVLink. CUDA_ERROR if it is no such
  // descriptor.
  static absl::StatusOr<CudaVmmMemory> Import(const CudaContext& context, int fd, int64_t size_bytes);

  CudaVmmMemory(CudaVmmMemory&& other) noexcept { *this = std::move(other); }
  CudaVmmMemory& operator=(CudaVmmMemory&& other) noexcept;
  ~CudaVmmMemory() { Release(); }

  // A descriptor of it, close-on-exec. Each call gives another one.
  absl::StatusOr<UniqueFd> Export() const;

  int64_t size_bytes() const { return size_bytes_; }
  CudaMemHandle handle() const { return handle_; }

 private:
  CudaVmmMemory(CudaContext context, CudaMemHandle handle, int64_t size_bytes)
      : context_(std::move(context)), handle_(handle), size_bytes_(size_bytes) {}
  void Release();

  CudaContext context_;  // none once moved from
  CudaMemHandle handle_ = 0;
  int64_t size_bytes_ = 0;
};

// A range of device addresses, into which memory can be mapped piece by piece. Its end unmaps everything.
class CudaReservation {
 public:
  // `size_bytes` (> 0) is a multiple of the granularity, as every slab's size is.
  static absl::StatusOr<CudaReservation> Reserve(const CudaContext& context, int64_t size_bytes);

  CudaReservation(CudaReservation&& other) noexcept { *this = std::move(other); }
  CudaReservation& operator=(CudaReservation&& other) noexcept;
  ~CudaReservation() { Release(); }

  // Maps all of `memory` at `offset_bytes`, for the context's device. The memory stays for as long as it is mapped,
  // though the handle goes. With kRead a kernel that writes to it ends its own process's context with an illegal
  // access; it does not stop whoever holds the descriptor from mapping it otherwise.
  absl::Status Map(int64_t offset_bytes, const CudaVmmMemory& memory, CudaAccess access);

  // Changes what the context's device may do with everything that is mapped.
  absl::Status SetAccess(CudaAccess access);

  CudaDevicePtr address() const { return address_; }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  struct Piece {
    CudaDevicePtr address;
    int64_t size_bytes;
  };

  CudaReservation(CudaContext context, CudaDevicePtr address, int64_t size_bytes)
      : context_(std::move(context)), address_(address), size_bytes_(size_bytes) {}
  absl::Status SetAccessOf(const Piece& piece, CudaAccess access) const;
  void Release();

  CudaContext context_;  // none once moved from
  CudaDevicePtr address_ = 0;
  int64_t size_bytes_ = 0;
  std::vector<Piece> mapped_;
};

// Memory that cudaMalloc would give, freed at the end.
class CudaIpcMemory {
 public:
  // `size_bytes` (> 0) is rounded up to kCudaIpcGranularityBytes. Fails as CudaVmmMemory::Create does.
  static absl::StatusOr<CudaIpcMemory> Allocate(const CudaContext& context, int64_t size_bytes);

  CudaIpcMemory(CudaIpcMemory&& other) noexcept { *this = std::move(other); }
  CudaIpcMemory& operator=(CudaIpcMemory&& other) noexcept;
  ~CudaIpcMemory() { Release(); }

  // The handle that cudaIpcGetMemHandle would give. A capability: do not log it.
  absl::StatusOr<CudaIpcHandle> Export() const;

  CudaDevicePtr address() const { return address_; }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  CudaIpcMemory(CudaContext context, CudaDevicePtr address, int64_t size_bytes)
      : context_(std::move(context)), address_(address), size_bytes_(size_bytes) {}
  void Release();

  CudaContext context_;  // none once moved from
  CudaDevicePtr address_ = 0;
  int64_t size_bytes_ = 0;
};

// Another process's CudaIpcMemory, mapped writable: CUDA IPC knows no other way.
class CudaIpcMapping {
 public:
  // Of memory that has `size_bytes`, by what whoever gave the handle says. PROTOCOL_ERROR if by what the driver says it
  // has fewer; HANDLE_STALE if the process that exported it has ended; CUDA_ERROR otherwise, also for a handle of this
  // process. On which GPU the memory lies the driver does not say: opened in the context of another one it passes for
  // that one's.
  static absl::StatusOr<CudaIpcMapping> Open(const CudaContext& context, const CudaIpcHandle& handle,
                                             int64_t size_bytes);

  CudaIpcMapping(CudaIpcMapping&& other) noexcept { *this = std::move(other); }
  CudaIpcMapping& operator=(CudaIpcMapping&& other) noexcept;
  ~CudaIpcMapping() { Release(); }

  CudaDevicePtr address() const { return address_; }

 private:
  CudaIpcMapping(CudaContext context, CudaDevicePtr address) : context_(std::move(context)), address_(address) {}
  absl::Status CheckSize(int64_t size_bytes) const;
  void Release();

  CudaContext context_;  // none once moved from
  CudaDevicePtr address_ = 0;
};

}  // namespace weightbroker
