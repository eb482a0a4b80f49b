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

}  // namespace

// Exit handlers run last in, first out. The driver has registered its own when it was initialized, before anything
// could be mapped: this one says in time that it will soon be gone.
void WatchForExit() {
  static std::once_flag once;
  std::call_once(once, [] { std::atexit([] { g_exiting = true; }); });
}

bool IsExiting() { return g_exiting; }

void WaitForGpu(const CudaContext& context) {
  const CudaScope current(context);
  if (current.status().ok()) (void)context.driver().CtxSynchronize();
}

CudaMemory::CudaMemory(const CudaContext& context, const std::string& uuid)
    : device_{DeviceKind::kCuda, context.device(), uuid}, mappings_(std::make_unique<Mappings>(context)) {
  WatchForExit();
}

CudaMemory::~CudaMemory() {
  if (g_exiting) {
    static_cast<void>(mappings_.release());
    return;
  }
  WaitForGpu(mappings_->context);
}

void CudaMemory::AddView(CudaDevicePtr address, int64_t size_bytes) {
  views_.push_back({reinterpret_cast<const std::byte*>(address), size_bytes});
}

absl::StatusOr<std::unique_ptr<CudaMemory>> CudaMemory::Import(const CudaContext& context, const std::string& uuid,
                                                               std::span<const VmmSlab> slabs) {
  if (slabs.empty()) return Take(context, uuid, std::nullopt, {});
  std::vector<CudaVmmMemory> imported;
  std::vector<int64_t> slab_bytes;
  int64_t total_bytes = 0;
  for (const VmmSlab& slab : slabs) {
    ASSIGN_OR_RETURN(CudaVmmMemory memory, CudaVmmMemory::Import(context, slab.fd, slab.size_bytes));
    imported.push_back(std::move(memory));
    slab_bytes.push_back(slab.size_bytes);
    total_bytes += slab.size_bytes;
  }
  ASSIGN_OR_RETURN(CudaReservation range, CudaReservation::Reserve(context, total_bytes));
  int64_t offset_bytes = 0;
  for (const CudaVmmMemory& memory : imported) {
    RETURN_IF_ERROR(range.Map(offset_bytes, memory, CudaAccess::kRead));
    offset_bytes += memory.size_bytes();
  }
  return Take(context, uuid, std::move(range), slab_bytes);
}

std::unique_ptr<CudaMemory> CudaMemory::Take(const CudaContext& context, const std::string& uuid,
                                             std::optional<CudaReservation> range,
                                             const std::vector<int64_t>& slab_bytes) {
  std::unique_ptr<CudaMemory> memory(new CudaMemory(context, uuid));
  CudaDevicePtr next = range.has_value() ? range->address() : 0;
  for (const int64_t size_bytes : slab_bytes) {
    memory->AddView(next, size_bytes);
    next += static_cast<CudaDevicePtr>(size_bytes);
  }
  memory->mappings_->range = std::move(range);
  return memory;
}

absl::StatusOr<std::unique_ptr<CudaMemory>> CudaMemory::Open(const CudaContext& context, const std::string& uuid,
                                                             std::span<const IpcSlab> slabs) {
  std::unique_ptr<CudaMemory> memory(new CudaMemory(context, uuid));
  for (const IpcSlab& slab : slabs) {
    ASSIGN_OR_RETURN(CudaIpcMapping mapping, CudaIpcMapping::Open(context, slab.handle, slab.size_bytes));
    memory->AddView(mapping.address(), slab.size_bytes);
    memory->mappings_->opened.push_back(std::move(mapping));
  }
  return memory;
}

absl::Status CudaMemory::Verify(const std::vector<Tensor>& tensors, int /*threads*/) const {
  return VerifyOnGpu(mappings_->context, tensors);
}

}  // namespace weightbroker::client
