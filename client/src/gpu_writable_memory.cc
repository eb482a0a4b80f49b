// Slabs on a GPU that a publisher may write to: see writable_memory.h.

#include <cstring>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/cuda_memory.h"
#include "client/src/writable_memory.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/memory/cuda_slab.h"

namespace weightbroker::client {
namespace {

CudaDevicePtr AddressOf(const void* data) { return reinterpret_cast<CudaDevicePtr>(data); }

// What is given back, unless the process exits.
struct Mappings {
  explicit Mappings(CudaContext of) : context(std::move(of)) {}
  ~Mappings() {
    if (stream == nullptr) return;
    const CudaScope current(context);
    (void)context.driver().StreamDestroy(stream);
  }
  Mappings(const Mappings&) = delete;
  Mappings& operator=(const Mappings&) = delete;

  const CudaContext context;
  CudaStream stream = nullptr;
  std::vector<CudaReservation> ranges;
  std::vector<CudaIpcMapping> opened;
  std::map<CudaDevice, CudaContext> other_contexts;  // of GPUs that tensors were copied from
};

class GpuWritableMemory : public WritableMemory {
 public:
  GpuWritableMemory(const EngineDevice& engine, const CudaContext& context)
      : engine_(engine), mappings_(std::make_unique<Mappings>(context)) {
    WatchForExit();
  }

  ~GpuWritableMemory() override {
    if (IsExiting()) {
      static_cast<void>(mappings_.release());
      return;
    }
    WaitForGpu(mappings_->context);
  }

  absl::Status CreateStream() {
    const CudaScope current(mappings_->context);
    RETURN_IF_ERROR(current.status());
    // One that waits for the default stream, where an engine that names no other has made its tensors.
    return Check(driver().StreamCreate(kCudaStreamDefault, &mappings_->stream), "cuStreamCreate");
  }

  absl::Status Add(std::span<const v1::Slab> slabs, std::span<const UniqueFd> fds) override {
    return fds.empty() ? OpenAll(slabs) : ImportAll(slabs, fds);
  }

  Device device() const override { return {DeviceKind::kCuda, engine_.device, engine_.uuid}; }

  absl::Status Copy(std::byte* to, const void* from, int64_t size_bytes) override {
    const CudaScope current(mappings_->context);
    RETURN_IF_ERROR(current.status());
    const auto size = static_cast<size_t>(size_bytes);
    if (IsOnGpu(from)) {
      RETURN_IF_ERROR(WaitForGpuOf(from));
      return Check(driver().MemcpyDtoDAsync(AddressOf(to), AddressOf(from), size, stream()), "cuMemcpyDtoDAsync");
    }
    RETURN_IF_ERROR(Check(driver().MemcpyHtoDAsync(AddressOf(to), from, size, stream()), "cuMemcpyHtoDAsync"));
    return Check(driver().StreamSynchronize(stream()), "cuStreamSynchronize");
  }

  void UseStream(void* stream) override { callers_stream_ = stream; }

  absl::Status Synchronize() override {
    const CudaScope current(mappings_->context);
    RETURN_IF_ERROR(current.status());
    return Check(driver().CtxSynchronize(), "cuCtxSynchronize");
  }

 private:
  CudaDriver& driver() const { return mappings_->context.driver(); }

  CudaStream stream() const { return callers_stream_.value_or(mappings_->stream); }

  absl::Status Check(CudaResult result, const char* call) const {
    if (result == kCudaSuccess) return absl::OkStatus();
    return CudaError(driver(), result, call, absl::StrCat("publishing tensors on the GPU ", engine_.uuid));
  }

  // Memory that the driver does not know is the host's.
  bool IsOnGpu(const void* data) const {
    int type = kCudaMemoryHost;
    return driver().PointerGetMemoryType(AddressOf(data), &type) == kCudaSuccess && type == kCudaMemoryDevice;
  }

  // Whatever stream of another GPU the data comes from: no stream here can be told to wait for one that nobody has
  // named.
  absl::Status WaitForGpuOf(const void* data) {
    CudaDevice device = 0;
    RETURN_IF_ERROR(Check(driver().PointerGetDevice(AddressOf(data), &device), "cuPointerGetAttribute"));
    if (device == engine_.device) return absl::OkStatus();
    auto known = mappings_->other_contexts.find(device);
    if (known == mappings_->other_contexts.end()) {
      ASSIGN_OR_RETURN(CudaContext context, CudaContext::Retain(driver(), device));
      known = mappings_->other_contexts.emplace(device, std::move(context)).first;
    }
    const CudaScope current(known->second);
    RETURN_IF_ERROR(current.status());
    return Check(driver().CtxSynchronize(), "cuCtxSynchronize");
  }

  absl::Status ImportAll(std::span<const v1::Slab> slabs, std::span<const UniqueFd> fds) {
    const CudaContext& context = mappings_->context;
    std::vector<CudaReservation> ranges;
    for (size_t i = 0; i < slabs.size(); ++i) {
      ASSIGN_OR_RETURN(const CudaVmmMemory memory, CudaVmmMemory::Import(context, fds[i].get(), slabs[i].size_bytes()));
      ASSIGN_OR_RETURN(CudaReservation range, CudaReservation::Reserve(context, memory.size_bytes()));
      RETURN_IF_ERROR(range.Map(0, memory, CudaAccess::kReadWrite));
      ranges.push_back(std::move(range));
    }
    for (const CudaReservation& range : ranges) AddSlab(range.address(), range.size_bytes());
    std::move(ranges.begin(), ranges.end(), std::back_inserter(mappings_->ranges));
    return absl::OkStatus();
  }

  absl::Status OpenAll(std::span<const v1::Slab> slabs) {
    std::vector<CudaIpcMapping> opened;
    for (const v1::Slab& slab : slabs) {
      CudaIpcHandle handle = {};
      if (slab.cuda_ipc_handle().size() != handle.size()) {
        return MakeError(Reason::kProtocolError, absl::StrCat("the service gave a publisher a CUDA IPC handle of ",
                                                              slab.cuda_ipc_handle().size(), " bytes"));
      }
      memcpy(handle.data(), slab.cuda_ipc_handle().data(), handle.size());
      ASSIGN_OR_RETURN(CudaIpcMapping mapping, CudaIpcMapping::Open(mappings_->context, handle, slab.size_bytes()));
      opened.push_back(std::move(mapping));
    }
    for (size_t i = 0; i < slabs.size(); ++i) AddSlab(opened[i].address(), slabs[i].size_bytes());
    std::move(opened.begin(), opened.end(), std::back_inserter(mappings_->opened));
    return absl::OkStatus();
  }

  void AddSlab(CudaDevicePtr address, int64_t size_bytes) {
    slabs_.push_back({reinterpret_cast<std::byte*>(address), size_bytes});
  }

  const EngineDevice engine_;
  std::unique_ptr<Mappings> mappings_;
  std::optional<CudaStream> callers_stream_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<WritableMemory>> OpenGpuWritableMemory(const EngineDevice& engine) {
  ASSIGN_OR_RETURN(const CudaContext context, CudaContext::Retain(*engine.driver, engine.device));
  auto memory = std::make_unique<GpuWritableMemory>(engine, context);
  RETURN_IF_ERROR(memory->CreateStream());
  return memory;
}

}  // namespace weightbroker::client
