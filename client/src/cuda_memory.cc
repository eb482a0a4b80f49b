#include "client/src/cuda_memory.h"

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "client/src/cuda_verify.h"
#include "common/base/status_macros.h"

namespace weightbroker::client {
namespace {

std::atomic<bool> g_exiting{false};

// Exit handlers run last in, first out. The driver has registered its own when it was initialized, before anything
// could be mapped: this one says in time that it will soon be gone.
void WatchForExit() {
  static std::once_flag once;
  std::call_once(once, [] { std::atexit([] { g_exiting = true; }); });
}

}  // namespace

CudaMemory::CudaMemory(const CudaContext& context, const std::string& uuid)
    : device_{DeviceKind::kCuda, context.device(), uuid}, mappings_(std::make_unique<Mappings>(context)) {
  WatchForExit();
}

CudaMemory::~CudaMemory() {
  if (g_exiting) static_cast<void>(mappings_.release());
}

void CudaMemory::AddView(CudaDevicePtr address, int64_t size_bytes) {
  views_.push_back({reinterpret_cast<const std::byte*>(address), size_bytes});
}

absl::StatusOr<std::unique_ptr<CudaMemory>> CudaMemory::Import(const CudaContext& context, const std::string& uuid,
                                                               std::span<const VmmSlab> slabs) {
  std::vector<CudaVmmMemory> imported;
  for (const VmmSlab& slab : slabs) {
    ASSIGN_OR_RETURN(CudaVmmMemory memory, CudaVmmMemory::Import(context, slab.fd, slab.size_bytes));
    imported.push_back(std::move(memory));
  }
  return Adopt(context, uuid, imported);
}

absl::StatusOr<std::unique_ptr<CudaMemory>> CudaMemory::Adopt(const CudaContext& context, const std::string& uuid,
                                                              std::span<const CudaVmmMemory> slabs) {
  std::unique_ptr<CudaMemory> memory(new CudaMemory(context, uuid));
  if (slabs.empty()) return memory;
  int64_t total_bytes = 0;
  for (const CudaVmmMemory& slab : slabs) total_bytes += slab.size_bytes();
  ASSIGN_OR_RETURN(memory->mappings_->range, CudaReservation::Reserve(context, total_bytes));
  CudaReservation& range = *memory->mappings_->range;
  int64_t offset_bytes = 0;
  for (const CudaVmmMemory& slab : slabs) {
    RETURN_IF_ERROR(range.Map(offset_bytes, slab, CudaAccess::kRead));
    memory->AddView(range.address() + static_cast<CudaDevicePtr>(offset_bytes), slab.size_bytes());
    offset_bytes += slab.size_bytes();
  }
  return memory;
}

absl::StatusOr<std::unique_ptr<CudaMemory>> CudaMemory::Open(const CudaContext& context, const std::string& uuid,
                                                             std::span<const IpcSlab> slabs) {
  std::unique_ptr<CudaMemory> memory(new CudaMemory(context, uuid));
  for (const IpcSlab& slab : slabs) {
    ASSIGN_OR_RETURN(CudaIpcMapping mapping, CudaIpcMapping::Open(context, slab.handle));
    memory->AddView(mapping.address(), slab.size_bytes);
    memory->mappings_->opened.push_back(std::move(mapping));
  }
  return memory;
}

absl::Status CudaMemory::Verify(const std::vector<Tensor>& tensors, int /*threads*/) const {
  return VerifyOnGpu(mappings_->context, tensors);
}

}  // namespace weightbroker::client
