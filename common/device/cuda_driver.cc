#include "common/device/cuda_driver.h"

#include <dlfcn.h>

#include <cstdio>
#include <map>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/mutex.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";

// X(member, symbol in libcuda, parameters). The symbols carry the version of each call whose parameters are these.
// clang-format off
#define WEIGHTBROKER_CUDA_CALLS(X)                                                                                    \
  X(init, "cuInit", (unsigned))                                                                                       \
  X(driver_get_version, "cuDriverGetVersion", (int*))                                                                 \
  X(device_get_count, "cuDeviceGetCount", (int*))                                                                     \
  X(device_get, "cuDeviceGet", (CudaDevice*, int))                                                                    \
  X(device_get_uuid, "cuDeviceGetUuid", (CudaUuid*, CudaDevice))                                                      \
  X(device_get_name, "cuDeviceGetName", (char*, int, CudaDevice))                                                     \
  X(device_get_attribute, "cuDeviceGetAttribute", (int*, int, CudaDevice))                                            \
  X(primary_ctx_retain, "cuDevicePrimaryCtxRetain", (CudaContextHandle*, CudaDevice))                                 \
  X(primary_ctx_release, "cuDevicePrimaryCtxRelease_v2", (CudaDevice))                                                \
  X(primary_ctx_get_state, "cuDevicePrimaryCtxGetState", (CudaDevice, unsigned*, int*))                               \
  X(ctx_push_current, "cuCtxPushCurrent_v2", (CudaContextHandle))                                                     \
  X(ctx_pop_current, "cuCtxPopCurrent_v2", (CudaContextHandle*))                                                      \
  X(ctx_get_current, "cuCtxGetCurrent", (CudaContextHandle*))                                                         \
  X(ctx_get_device, "cuCtxGetDevice", (CudaDevice*))                                                                  \
  X(ctx_synchronize, "cuCtxSynchronize", ())                                                                          \
  X(mem_get_info, "cuMemGetInfo_v2", (size_t*, size_t*))                                                              \
  X(mem_get_granularity, "cuMemGetAllocationGranularity", (size_t*, const CudaAllocationProp*, int))                  \
  X(mem_create, "cuMemCreate", (CudaMemHandle*, size_t, const CudaAllocationProp*, unsigned long long))               \
  X(mem_release, "cuMemRelease", (CudaMemHandle))                                                                     \
  X(mem_export, "cuMemExportToShareableHandle", (void*, CudaMemHandle, int, unsigned long long))                      \
  X(mem_import, "cuMemImportFromShareableHandle", (CudaMemHandle*, void*, int))                                       \
  X(mem_get_prop, "cuMemGetAllocationPropertiesFromHandle", (CudaAllocationProp*, CudaMemHandle))                     \
  X(mem_address_reserve, "cuMemAddressReserve", (CudaDevicePtr*, size_t, size_t, CudaDevicePtr, unsigned long long))  \
  X(mem_address_free, "cuMemAddressFree", (CudaDevicePtr, size_t))                                                    \
  X(mem_map, "cuMemMap", (CudaDevicePtr, size_t, size_t, CudaMemHandle, unsigned long long))                          \
  X(mem_unmap, "cuMemUnmap", (CudaDevicePtr, size_t))                                                                 \
  X(mem_set_access, "cuMemSetAccess", (CudaDevicePtr, size_t, const CudaAccessDesc*, size_t))                         \
  X(mem_alloc, "cuMemAlloc_v2", (CudaDevicePtr*, size_t))                                                             \
  X(mem_free, "cuMemFree_v2", (CudaDevicePtr))                                                                        \
  X(ipc_get_mem_handle, "cuIpcGetMemHandle", (CudaIpcHandle*, CudaDevicePtr))                                         \
  X(ipc_open_mem_handle, "cuIpcOpenMemHandle_v2", (CudaDevicePtr*, CudaIpcHandle, unsigned))                          \
  X(ipc_close_mem_handle, "cuIpcCloseMemHandle", (CudaDevicePtr))                                                     \
  X(pointer_get_attribute, "cuPointerGetAttribute", (void*, int, CudaDevicePtr))                                      \
  X(mem_get_address_range, "cuMemGetAddressRange_v2", (CudaDevicePtr*, size_t*, CudaDevicePtr))                       \
  X(mem_host_alloc, "cuMemHostAlloc", (void**, size_t, unsigned))                                                     \
  X(mem_free_host, "cuMemFreeHost", (void*))                                                                          \
  X(mem_host_register, "cuMemHostRegister_v2", (void*, size_t, unsigned))                                             \
  X(mem_host_unregister, "cuMemHostUnregister", (void*))                                                              \
  X(stream_create, "cuStreamCreate", (CudaStream*, unsigned))                                                         \
  X(stream_destroy, "cuStreamDestroy_v2", (CudaStream))                                                               \
  X(stream_synchronize, "cuStreamSynchronize", (CudaStream))                                                          \
  X(stream_wait_event, "cuStreamWaitEvent", (CudaStream, CudaEvent, unsigned))                                           \
  X(event_create, "cuEventCreate", (CudaEvent*, unsigned))                                                            \
  X(event_destroy, "cuEventDestroy_v2", (CudaEvent))                                                                  \
  X(event_record, "cuEventRecord", (CudaEvent, CudaStream))                                                           \
  X(event_synchronize, "cuEventSynchronize", (CudaEvent))                                                             \
  X(memcpy_htod_async, "cuMemcpyHtoDAsync_v2", (CudaDevicePtr, const void*, size_t, CudaStream))                      \
  X(memcpy_2d_async, "cuMemcpy2DAsync_v2", (const CudaMemcpy2D*, CudaStream))                                         \
  X(memcpy_dtoh_async, "cuMemcpyDtoHAsync_v2", (void*, CudaDevicePtr, size_t, CudaStream))                            \
  X(memcpy_dtod_async, "cuMemcpyDtoDAsync_v2", (CudaDevicePtr, CudaDevicePtr, size_t, CudaStream))                    \
  X(memset_d8_async, "cuMemsetD8Async", (CudaDevicePtr, unsigned char, size_t, CudaStream))                           \
  X(module_load_data, "cuModuleLoadData", (CudaModule*, const void*))                                                 \
  X(module_unload, "cuModuleUnload", (CudaModule))                                                                    \
  X(module_get_function, "cuModuleGetFunction", (CudaFunction*, CudaModule, const char*))                             \
  X(launch_kernel, "cuLaunchKernel", (CudaFunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,       \
                                      unsigned, CudaStream, void**, void**))                                          \
  X(get_error_name, "cuGetErrorName", (CudaResult, const char**))                                                     \
  X(get_error_string, "cuGetErrorString", (CudaResult, const char**))
// clang-format on

// CUDA_MEMCPY2D.
struct CudaMemcpy2D {
  size_t source_x = 0;
  size_t source_y = 0;
  int source_type = kCudaMemoryHost;
  const void* source_host = nullptr;
  CudaDevicePtr source_device = 0;
  void* source_array = nullptr;
  size_t source_pitch = 0;
  size_t destination_x = 0;
  size_t destination_y = 0;
  int destination_type = kCudaMemoryDevice;
  void* destination_host = nullptr;
  CudaDevicePtr destination_device = 0;
  void* destination_array = nullptr;
  size_t destination_pitch = 0;
  size_t width_bytes = 0;
  size_t height = 0;
};

struct Calls {
#define WEIGHTBROKER_CUDA_MEMBER(member, symbol, parameters) CudaResult(*member) parameters = nullptr;
  WEIGHTBROKER_CUDA_CALLS(WEIGHTBROKER_CUDA_MEMBER)
#undef WEIGHTBROKER_CUDA_MEMBER
};

// 13000 is 13.0.
std::string CudaVersion(int version) { return absl::StrCat(version / 1000, ".", version % 1000 / 10); }

template <typename Function>
bool Find(void* library, const char* symbol, Function* function) {
  // POSIX lets dlsym's result be a function; ISO C++ has no cast for it.
  *reinterpret_cast<void**>(function) = dlsym(library, symbol);
  return *function != nullptr;
}

class RealCudaDriver : public CudaDriver {
 public:
  explicit RealCudaDriver(const Calls& calls) : calls_(calls) {}

  CudaResult Init() override { return calls_.init(0); }
  CudaResult DriverGetVersion(int* version) override { return calls_.driver_get_version(version); }
  CudaResult DeviceGetCount(int* count) override { return calls_.device_get_count(count); }
  CudaResult DeviceGet(int ordinal, CudaDevice* device) override { return calls_.device_get(device, ordinal); }
  CudaResult DeviceGetUuid(CudaDevice device, CudaUuid* uuid) override { return calls_.device_get_uuid(uuid, device); }
  CudaResult DeviceGetName(CudaDevice device, std::string* name) override {
    char text[256] = "";
    const CudaResult result = calls_.device_get_name(text, sizeof(text) - 1, device);
    *name = text;
    return result;
  }
  CudaResult DeviceGetAttribute(CudaDevice device, int attribute, int* value) override {
    return calls_.device_get_attribute(value, attribute, device);
  }

  CudaResult DevicePrimaryCtxRetain(CudaDevice device, CudaContextHandle* context) override {
    return calls_.primary_ctx_retain(context, device);
  }
  CudaResult DevicePrimaryCtxRelease(CudaDevice device) override { return calls_.primary_ctx_release(device); }
  CudaResult DevicePrimaryCtxGetState(CudaDevice device, unsigned* flags, int* active) override {
    return calls_.primary_ctx_get_state(device, flags, active);
  }
  CudaResult CtxPushCurrent(CudaContextHandle context) override { return calls_.ctx_push_current(context); }
  CudaResult CtxPopCurrent(CudaContextHandle* context) override { return calls_.ctx_pop_current(context); }
  CudaResult CtxGetCurrent(CudaContextHandle* context) override { return calls_.ctx_get_current(context); }
  CudaResult CtxGetDevice(CudaDevice* device) override { return calls_.ctx_get_device(device); }
  CudaResult CtxSynchronize() override { return calls_.ctx_synchronize(); }

  CudaResult MemGetInfo(size_t* free_bytes, size_t* total_bytes) override {
    return calls_.mem_get_info(free_bytes, total_bytes);
  }
  CudaResult MemGetAllocationGranularity(const CudaAllocationProp& prop, int option, size_t* granularity) override {
    return calls_.mem_get_granularity(granularity, &prop, option);
  }
  CudaResult MemCreate(size_t size_bytes, const CudaAllocationProp& prop, CudaMemHandle* handle) override {
    return calls_.mem_create(handle, size_bytes, &prop, 0);
  }
  CudaResult MemRelease(CudaMemHandle handle) override { return calls_.mem_release(handle); }
  CudaResult MemExportToFd(CudaMemHandle handle, int* fd) override {
    return calls_.mem_export(fd, handle, kCudaHandlePosixFd, 0);
  }
  CudaResult MemImportFromFd(int fd, CudaMemHandle* handle) override {
    return calls_.mem_import(handle, reinterpret_cast<void*>(static_cast<intptr_t>(fd)), kCudaHandlePosixFd);
  }
  CudaResult MemGetAllocationPropertiesFromHandle(CudaMemHandle handle, CudaAllocationProp* prop) override {
    return calls_.mem_get_prop(prop, handle);
  }
  CudaResult MemAddressReserve(size_t size_bytes, size_t alignment, CudaDevicePtr* address) override {
    return calls_.mem_address_reserve(address, size_bytes, alignment, 0, 0);
  }
  CudaResult MemAddressFree(CudaDevicePtr address, size_t size_bytes) override {
    return calls_.mem_address_free(address, size_bytes);
  }
  CudaResult MemMap(CudaDevicePtr address, size_t size_bytes, CudaMemHandle handle) override {
    return calls_.mem_map(address, size_bytes, 0, handle, 0);
  }
  CudaResult MemUnmap(CudaDevicePtr address, size_t size_bytes) override {
    return calls_.mem_unmap(address, size_bytes);
  }
  CudaResult MemSetAccess(CudaDevicePtr address, size_t size_bytes, const CudaAccessDesc& access) override {
    return calls_.mem_set_access(address, size_bytes, &access, 1);
  }

  CudaResult MemAlloc(size_t size_bytes, CudaDevicePtr* address) override {
    return calls_.mem_alloc(address, size_bytes);
  }
  CudaResult MemFree(CudaDevicePtr address) override { return calls_.mem_free(address); }
  CudaResult IpcGetMemHandle(CudaDevicePtr address, CudaIpcHandle* handle) override {
    return calls_.ipc_get_mem_handle(handle, address);
  }
  CudaResult IpcOpenMemHandle(const CudaIpcHandle& handle, unsigned flags, CudaDevicePtr* address) override {
    return calls_.ipc_open_mem_handle(address, handle, flags);
  }
  CudaResult IpcCloseMemHandle(CudaDevicePtr address) override { return calls_.ipc_close_mem_handle(address); }

  CudaResult PointerGetMemoryType(CudaDevicePtr address, int* type) override {
    return calls_.pointer_get_attribute(type, kCudaPointerAttributeMemoryType, address);
  }
  CudaResult PointerGetDevice(CudaDevicePtr address, CudaDevice* device) override {
    return calls_.pointer_get_attribute(device, kCudaPointerAttributeDeviceOrdinal, address);
  }
  CudaResult MemGetAddressRange(CudaDevicePtr address, CudaDevicePtr* base, size_t* size_bytes) override {
    return calls_.mem_get_address_range(base, size_bytes, address);
  }

  CudaResult MemHostAlloc(size_t size_bytes, unsigned flags, void** data) override {
    return calls_.mem_host_alloc(data, size_bytes, flags);
  }
  CudaResult MemFreeHost(void* data) override { return calls_.mem_free_host(data); }
  CudaResult MemHostRegister(void* data, size_t size_bytes, unsigned flags) override {
    return calls_.mem_host_register(data, size_bytes, flags);
  }
  CudaResult MemHostUnregister(void* data) override { return calls_.mem_host_unregister(data); }

  CudaResult StreamCreate(unsigned flags, CudaStream* stream) override { return calls_.stream_create(stream, flags); }
  CudaResult StreamDestroy(CudaStream stream) override { return calls_.stream_destroy(stream); }
  CudaResult StreamSynchronize(CudaStream stream) override { return calls_.stream_synchronize(stream); }
  CudaResult StreamWaitEvent(CudaStream stream, CudaEvent event) override {
    return calls_.stream_wait_event(stream, event, 0);
  }
  CudaResult EventCreate(unsigned flags, CudaEvent* event) override { return calls_.event_create(event, flags); }
  CudaResult EventDestroy(CudaEvent event) override { return calls_.event_destroy(event); }
  CudaResult EventRecord(CudaEvent event, CudaStream stream) override { return calls_.event_record(event, stream); }
  CudaResult EventSynchronize(CudaEvent event) override { return calls_.event_synchronize(event); }

  CudaResult MemcpyHtoDAsync(CudaDevicePtr to, const void* from, size_t size_bytes, CudaStream stream) override {
    return calls_.memcpy_htod_async(to, from, size_bytes, stream);
  }
  CudaResult MemcpyHtoDRowsAsync(const CudaRows& rows, CudaStream stream) override {
    const CudaMemcpy2D copy = {.source_host = rows.from,
                               .source_pitch = rows.from_pitch,
                               .destination_device = rows.to,
                               .destination_pitch = rows.to_pitch,
                               .width_bytes = rows.row_bytes,
                               .height = rows.rows};
    return calls_.memcpy_2d_async(&copy, stream);
  }
  CudaResult MemcpyDtoHAsync(void* to, CudaDevicePtr from, size_t size_bytes, CudaStream stream) override {
    return calls_.memcpy_dtoh_async(to, from, size_bytes, stream);
  }
  CudaResult MemcpyDtoDAsync(CudaDevicePtr to, CudaDevicePtr from, size_t size_bytes, CudaStream stream) override {
    return calls_.memcpy_dtod_async(to, from, size_bytes, stream);
  }
  CudaResult MemsetD8Async(CudaDevicePtr to, uint8_t value, size_t size_bytes, CudaStream stream) override {
    return calls_.memset_d8_async(to, value, size_bytes, stream);
  }

  CudaResult ModuleLoadData(const void* image, CudaModule* module) override {
    return calls_.module_load_data(module, image);
  }
  CudaResult ModuleUnload(CudaModule module) override { return calls_.module_unload(module); }
  CudaResult ModuleGetFunction(CudaModule module, const char* name, CudaFunction* function) override {
    return calls_.module_get_function(function, module, name);
  }
  CudaResult LaunchKernel(CudaFunction function, const CudaLaunch& launch, CudaStream stream,
                          void** parameters) override {
    return calls_.launch_kernel(function, launch.grid_blocks, 1, 1, launch.block_threads, 1, 1, 0, stream, parameters,
                                nullptr);
  }

  std::string ErrorName(CudaResult result) override {
    const char* text = nullptr;
    if (calls_.get_error_name(result, &text) != kCudaSuccess || text == nullptr) return absl::StrCat(result);
    return text;
  }
  std::string ErrorString(CudaResult result) override {
    const char* text = nullptr;
    if (calls_.get_error_string(result, &text) != kCudaSuccess || text == nullptr) return "an unknown error";
    return text;
  }

 private:
  const Calls calls_;
};

absl::Status TooOld(const Calls& calls, const char* symbol) {
  int version = 0;
  if (calls.driver_get_version != nullptr) calls.driver_get_version(&version);
  return MakeError(Reason::kDriverTooOld,
                   absl::StrCat("the GPU's driver is for CUDA ", CudaVersion(version), " and has no ", symbol,
                                ", which needs CUDA 11: install a newer driver"),
                   {{"call", symbol}, {"driver_version", CudaVersion(version)}});
}

absl::StatusOr<Calls> FindCalls(void* library) {
  Calls calls;
  const char* missing = nullptr;
#define WEIGHTBROKER_CUDA_FIND(member, symbol, parameters) \
  if (!Find(library, symbol, &calls.member) && missing == nullptr) missing = symbol;
  WEIGHTBROKER_CUDA_CALLS(WEIGHTBROKER_CUDA_FIND)
#undef WEIGHTBROKER_CUDA_FIND
  if (missing != nullptr) return TooOld(calls, missing);
  // Where a GPU is partitioned, this one tells the partition's UUID from the GPU's.
  if (decltype(calls.device_get_uuid) newer = nullptr; Find(library, "cuDeviceGetUuid_v2", &newer)) {
    calls.device_get_uuid = newer;
  }
  return calls;
}

absl::StatusOr<CudaDriver*> OpenDriver() {
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const said = dlerror();
    return MakeError(Reason::kGpuUnavailable,
                     absl::StrCat("there is no NVIDIA driver here: ", said != nullptr ? said : kLibrary));
  }
  ASSIGN_OR_RETURN(const Calls calls, FindCalls(library));
  static RealCudaDriver* const driver = new RealCudaDriver(calls);  // for the life of the process
  if (const CudaResult result = driver->Init(); result != kCudaSuccess) {
    return MakeError(Reason::kGpuUnavailable,
                     absl::StrCat("cuInit: ", driver->ErrorName(result), " (", driver->ErrorString(result),
                                  "): the driver is there but no GPU can be used"),
                     {{"call", "cuInit"}, {"result", driver->ErrorName(result)}});
  }
  return driver;
}

}  // namespace

absl::StatusOr<CudaDriver*> LoadCudaDriver() {
  static Mutex* const mutex = new Mutex;
  static absl::StatusOr<CudaDriver*>* loaded = nullptr;
  MutexLock lock(*mutex);
  if (loaded == nullptr) loaded = new absl::StatusOr<CudaDriver*>(OpenDriver());
  return *loaded;
}

absl::Status CudaError(CudaDriver& driver, CudaResult result, const char* call, const std::string& doing) {
  const std::string name = driver.ErrorName(result);
  return MakeError(result == kCudaOutOfMemory ? Reason::kMemoryExhausted : Reason::kCudaError,
                   absl::StrCat(doing, ": ", call, " failed with ", name, " (", driver.ErrorString(result), ")"),
                   {{"call", call}, {"result", name}});
}

std::string FormatGpuUuid(const CudaUuid& uuid) {
  std::string text = "GPU";
  for (size_t i = 0; i < uuid.size(); ++i) {
    const bool starts_group = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
    char digits[4];
    std::snprintf(digits, sizeof(digits), "%s%02x", starts_group ? "-" : "", uuid[i]);
    text += digits;
  }
  return text;
}

}  // namespace weightbroker
