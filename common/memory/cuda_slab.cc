#include "common/memory/cuda_slab.h"

#include <fcntl.h>

#include <cerrno>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

CudaAllocationProp PropertiesFor(CudaDevice device) {
  CudaAllocationProp prop;
  prop.location.id = device;
  return prop;
}

absl::Status CheckAttribute(CudaDriver& driver, CudaDevice device, int attribute, const char* what) {
  int value = 0;
  if (const CudaResult result = driver.DeviceGetAttribute(device, attribute, &value); result != kCudaSuccess) {
    return CudaError(driver, result, "cuDeviceGetAttribute", absl::StrCat("asking device ", device, " for ", what));
  }
  if (value != 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::string uuid, UuidOfCudaDevice(driver, device));
  return MakeError(Reason::kDeviceUnsupported,
                   absl::StrCat("the GPU ", uuid, " or its driver has no ", what, ": register the set as CUDA_IPC"),
                   {{"device_uuid", uuid}, {"lacks", what}});
}

absl::StatusOr<int64_t> Granularity(CudaDriver& driver, CudaDevice device) {
  size_t granularity = 0;
  const CudaResult result =
      driver.MemGetAllocationGranularity(PropertiesFor(device), kCudaGranularityMinimum, &granularity);
  if (result != kCudaSuccess || granularity == 0) {
    return CudaError(driver, result, "cuMemGetAllocationGranularity",
                     absl::StrCat("asking for the allocation granularity of device ", device));
  }
  return static_cast<int64_t>(granularity);
}

int64_t RoundUp(int64_t size_bytes, int64_t multiple) { return (size_bytes + multiple - 1) / multiple * multiple; }

// What an allocation that failed comes to. Memory that is out is said with what there is of it.
absl::Status AllocationError(const CudaContext& context, CudaResult result, const char* call, int64_t need_bytes) {
  CudaDriver& driver = context.driver();
  ASSIGN_OR_RETURN(const std::string uuid, UuidOfCudaDevice(driver, context.device()));
  const std::string doing = absl::StrCat("taking ", need_bytes, " bytes on the GPU ", uuid);
  if (result != kCudaOutOfMemory) {
    const absl::Status error = CudaError(driver, result, call, doing);
    auto metadata = GetErrorDetails(error).metadata;
    metadata["device_uuid"] = uuid;
    return MakeError(Reason::kCudaError, std::string(error.message()), metadata);
  }
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  (void)driver.MemGetInfo(&free_bytes, &total_bytes);
  return MakeError(Reason::kMemoryExhausted,
                   absl::StrCat(doing, ": only ", free_bytes, " of its ", total_bytes, " bytes are free"),
                   {{"need_bytes", absl::StrCat(need_bytes)},
                    {"have_bytes", absl::StrCat(free_bytes)},
                    {"limited_by", "device"},
                    {"device_uuid", uuid},
                    {"call", call}});
}

// Of the GPU where the memory lies; empty where this process does not see it.
absl::StatusOr<std::string> UuidWhereVisible(CudaDriver& driver, const CudaAllocationProp& prop) {
  if (prop.location.type != kCudaLocationDevice || prop.location.id < 0) return std::string();
  return UuidOfCudaDevice(driver, prop.location.id);
}

// Ok if `handle` is of memory on the context's device.
absl::Status CheckDeviceOf(const CudaContext& context, CudaMemHandle handle) {
  CudaDriver& driver = context.driver();
  CudaAllocationProp prop;
  if (const CudaResult result = driver.MemGetAllocationPropertiesFromHandle(handle, &prop); result != kCudaSuccess) {
    return CudaError(driver, result, "cuMemGetAllocationPropertiesFromHandle", "asking where a slab lies");
  }
  if (prop.location.type == kCudaLocationDevice && prop.location.id == context.device()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::string wanted, UuidOfCudaDevice(driver, context.device()));
  ASSIGN_OR_RETURN(const std::string found, UuidWhereVisible(driver, prop));
  return MakeError(
      Reason::kDeviceMismatch,
      absl::StrCat("the slab is on another GPU, ", found.empty() ? "one that this process does not see" : found,
                   ", than this engine's, ", wanted,
                   ": every access would go over the bus; run the engine on the GPU that has the weights"),
      {{"device_uuid", found.empty() ? "invisible" : found}, {"wanted_uuid", wanted}});
}

}  // namespace

absl::Status CheckCudaVmmSupport(CudaDriver& driver, CudaDevice device) {
  RETURN_IF_ERROR(CheckAttribute(driver, device, kCudaAttributeVirtualMemoryManagement, "virtual memory management"));
  return CheckAttribute(driver, device, kCudaAttributePosixFdHandles, "memory handles that are file descriptors");
}

absl::StatusOr<int64_t> CudaVmmSizeBytes(CudaDriver& driver, CudaDevice device, int64_t size_bytes) {
  ASSIGN_OR_RETURN(const int64_t granularity, Granularity(driver, device));
  return RoundUp(size_bytes, granularity);
}

// ---- CudaVmmMemory

absl::StatusOr<CudaVmmMemory> CudaVmmMemory::Create(const CudaContext& context, int64_t size_bytes) {
  ASSIGN_OR_RETURN(const int64_t rounded, CudaVmmSizeBytes(context.driver(), context.device(), size_bytes));
  const CudaScope current(context);
  RETURN_IF_ERROR(current.status());
  CudaMemHandle handle = 0;
  const CudaResult result =
      context.driver().MemCreate(static_cast<size_t>(rounded), PropertiesFor(context.device()), &handle);
  if (result != kCudaSuccess) return AllocationError(context, result, "cuMemCreate", rounded);
  return CudaVmmMemory(context, handle, rounded);
}

absl::StatusOr<CudaVmmMemory> CudaVmmMemory::Import(const CudaContext& context, int fd, int64_t size_bytes) {
  const CudaScope current(context);
  RETURN_IF_ERROR(current.status());
  CudaMemHandle handle = 0;
  if (const CudaResult result = context.driver().MemImportFromFd(fd, &handle); result != kCudaSuccess) {
    return CudaError(context.driver(), result, "cuMemImportFromShareableHandle", "taking over a slab's descriptor");
  }
  CudaVmmMemory memory(context, handle, size_bytes);
  RETURN_IF_ERROR(CheckDeviceOf(context, handle));
  return memory;
}

absl::StatusOr<UniqueFd> CudaVmmMemory::Export() const {
  int number = -1;
  if (const CudaResult result = context_.driver().MemExportToFd(handle_, &number); result != kCudaSuccess) {
    return CudaError(context_.driver(), result, "cuMemExportToShareableHandle", "making a descriptor of a slab");
  }
  UniqueFd fd(number);
  if (fcntl(fd.get(), F_SETFD, FD_CLOEXEC) != 0) return SystemError("fcntl of a slab's descriptor", errno);
  return fd;
}

CudaVmmMemory& CudaVmmMemory::operator=(CudaVmmMemory&& other) noexcept {
  if (this == &other) return *this;
  Release();
  context_ = std::move(other.context_);
  handle_ = std::exchange(other.handle_, 0);
  size_bytes_ = std::exchange(other.size_bytes_, 0);
  return *this;
}

// What fails here fails because the driver is at its end; the kernel then takes the memory back itself. So below.
void CudaVmmMemory::Release() {
  if (context_.has_value()) (void)context_.driver().MemRelease(handle_);
  context_ = CudaContext();
}

// ---- CudaReservation

absl::StatusOr<CudaReservation> CudaReservation::Reserve(const CudaContext& context, int64_t size_bytes) {
  const CudaScope current(context);
  RETURN_IF_ERROR(current.status());
  CudaDevicePtr address = 0;
  const CudaResult result = context.driver().MemAddressReserve(static_cast<size_t>(size_bytes), 0, &address);
  if (result != kCudaSuccess) {
    return CudaError(context.driver(), result, "cuMemAddressReserve",
                     absl::StrCat("reserving addresses for ", size_bytes, " bytes"));
  }
  return CudaReservation(context, address, size_bytes);
}

absl::Status CudaReservation::Map(int64_t offset_bytes, const CudaVmmMemory& memory, CudaAccess access) {
  if (offset_bytes < 0 || memory.size_bytes() > size_bytes_ - offset_bytes) {
    return MakeError(Reason::kInvalidArgument,
                     absl::StrCat("a slab of ", memory.size_bytes(), " bytes does not fit at ", offset_bytes,
                                  " of a reservation of ", size_bytes_));
  }
  CudaDriver& driver = context_.driver();
  const CudaScope current(context_);
  RETURN_IF_ERROR(current.status());
  const CudaDevicePtr at = address_ + static_cast<CudaDevicePtr>(offset_bytes);
  const auto size = static_cast<size_t>(memory.size_bytes());
  if (const CudaResult result = driver.MemMap(at, size, memory.handle()); result != kCudaSuccess) {
    return CudaError(driver, result, "cuMemMap", absl::StrCat("mapping a slab of ", size, " bytes"));
  }
  mapped_.push_back({at, memory.size_bytes()});
  return SetAccessOf(mapped_.back(), access);
}

absl::Status CudaReservation::SetAccess(CudaAccess access) {
  const CudaScope current(context_);
  RETURN_IF_ERROR(current.status());
  for (const Piece& piece : mapped_) RETURN_IF_ERROR(SetAccessOf(piece, access));
  return absl::OkStatus();
}

absl::Status CudaReservation::SetAccessOf(const Piece& piece, CudaAccess access) const {
  const CudaAccessDesc allowed = {{kCudaLocationDevice, context_.device()}, access};
  const CudaResult result =
      context_.driver().MemSetAccess(piece.address, static_cast<size_t>(piece.size_bytes), allowed);
  if (result == kCudaSuccess) return absl::OkStatus();
  return CudaError(context_.driver(), result, "cuMemSetAccess",
                   absl::StrCat("setting the access to a slab of ", piece.size_bytes, " bytes"));
}

CudaReservation& CudaReservation::operator=(CudaReservation&& other) noexcept {
  if (this == &other) return *this;
  Release();
  context_ = std::move(other.context_);
  address_ = std::exchange(other.address_, 0);
  size_bytes_ = std::exchange(other.size_bytes_, 0);
  mapped_ = std::exchange(other.mapped_, {});
  return *this;
}

void CudaReservation::Release() {
  if (!context_.has_value()) return;
  {
    const CudaScope current(context_);
    for (const Piece& piece : mapped_) {
      (void)context_.driver().MemUnmap(piece.address, static_cast<size_t>(piece.size_bytes));
    }
    (void)context_.driver().MemAddressFree(address_, static_cast<size_t>(size_bytes_));
  }
  mapped_.clear();
  context_ = CudaContext();
}

// ---- CudaIpcMemory

absl::StatusOr<CudaIpcMemory> CudaIpcMemory::Allocate(const CudaContext& context, int64_t size_bytes) {
  const int64_t rounded = RoundUp(size_bytes, kCudaIpcGranularityBytes);
  const CudaScope current(context);
  RETURN_IF_ERROR(current.status());
  CudaDevicePtr address = 0;
  const CudaResult result = context.driver().MemAlloc(static_cast<size_t>(rounded), &address);
  if (result != kCudaSuccess) return AllocationError(context, result, "cuMemAlloc", rounded);
  return CudaIpcMemory(context, address, rounded);
}

absl::StatusOr<CudaIpcHandle> CudaIpcMemory::Export() const {
  const CudaScope current(context_);
  RETURN_IF_ERROR(current.status());
  CudaIpcHandle handle = {};
  if (const CudaResult result = context_.driver().IpcGetMemHandle(address_, &handle); result != kCudaSuccess) {
    return CudaError(context_.driver(), result, "cuIpcGetMemHandle", "making a CUDA IPC handle of a slab");
  }
  return handle;
}

CudaIpcMemory& CudaIpcMemory::operator=(CudaIpcMemory&& other) noexcept {
  if (this == &other) return *this;
  Release();
  context_ = std::move(other.context_);
  address_ = std::exchange(other.address_, 0);
  size_bytes_ = std::exchange(other.size_bytes_, 0);
  return *this;
}

void CudaIpcMemory::Release() {
  if (!context_.has_value()) return;
  {
    const CudaScope current(context_);
    (void)context_.driver().MemFree(address_);
  }
  context_ = CudaContext();
}

// ---- CudaIpcMapping

absl::StatusOr<CudaIpcMapping> CudaIpcMapping::Open(const CudaContext& context, const CudaIpcHandle& handle,
                                                    int64_t size_bytes) {
  CudaDriver& driver = context.driver();
  const CudaScope current(context);
  RETURN_IF_ERROR(current.status());
  CudaDevicePtr address = 0;
  const CudaResult result = driver.IpcOpenMemHandle(handle, kCudaIpcLazyPeerAccess, &address);
  if (result == kCudaSuccess) {
    CudaIpcMapping mapping(context, address);
    RETURN_IF_ERROR(mapping.CheckSize(size_bytes));
    return mapping;
  }
  const absl::Status error = CudaError(driver, result, "cuIpcOpenMemHandle", "opening a CUDA IPC handle");
  if (result != kCudaInvalidHandle) return error;  // what the driver says of a handle whose process has ended
  return MakeError(Reason::kHandleStale,
                   absl::StrCat(error.message(), ": the process that exported it has ended; register the set again"),
                   GetErrorDetails(error).metadata);
}

absl::Status CudaIpcMapping::CheckSize(int64_t size_bytes) const {
  CudaDriver& driver = context_.driver();
  CudaDevicePtr base = 0;
  size_t range_bytes = 0;
  if (const CudaResult result = driver.MemGetAddressRange(address_, &base, &range_bytes); result != kCudaSuccess) {
    return CudaError(driver, result, "cuMemGetAddressRange", "asking for the size of an opened slab");
  }
  const auto found_bytes = static_cast<int64_t>(range_bytes - (address_ - base));
  if (size_bytes >= 0 && size_bytes <= found_bytes) return absl::OkStatus();
  return MakeError(Reason::kProtocolError,
                   absl::StrCat("a slab of kind CUDA_IPC is said to have ", size_bytes, " bytes and has ", found_bytes,
                                "; service and client library may be of different versions"),
                   {{"said_bytes", absl::StrCat(size_bytes)}, {"found_bytes", absl::StrCat(found_bytes)}});
}

CudaIpcMapping& CudaIpcMapping::operator=(CudaIpcMapping&& other) noexcept {
  if (this == &other) return *this;
  Release();
  context_ = std::move(other.context_);
  address_ = std::exchange(other.address_, 0);
  return *this;
}

void CudaIpcMapping::Release() {
  if (!context_.has_value()) return;
  {
    const CudaScope current(context_);
    (void)context_.driver().IpcCloseMemHandle(address_);
  }
  context_ = CudaContext();
}

}  // namespace weightbroker
