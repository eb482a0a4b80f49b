// The calls of the CUDA driver that this project makes, behind an interface: libcuda is opened when the first of them
// is needed, so that one program runs with and without a GPU, and builds without CUDA's headers.
//
//   auto cuda = LoadCudaDriver();
//   if (!cuda.ok()) return cuda.status();                        // GPU_UNAVAILABLE, DRIVER_TOO_OLD: what to do
//   CudaDevice device;
//   const CudaResult result = (*cuda)->DeviceGet(0, &device);
//   if (result != kCudaSuccess) return CudaError(**cuda, result, "cuDeviceGet", "finding the first GPU");
//
// Each method is the driver's function of the same name (cuDeviceGet for DeviceGet): its arguments, its rules, its
// thread-safety. CUDA's own documentation holds. See cuda_context.h and memory/cuda_slab.h for objects that own things.
// tests/support/fake_cuda_driver.h has an implementation in host memory that can be told to fail.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/reason.h"

namespace weightbroker {

// CUDA's types under our names, of the same layout: tests/unit/device compares them with cuda.h where that is there.
using CudaDevice = int;                           // CUdevice: an ordinal among the devices that this process sees
using CudaDevicePtr = uint64_t;                   // CUdeviceptr
using CudaMemHandle = uint64_t;                   // CUmemGenericAllocationHandle
using CudaContextHandle = void*;                  // CUcontext
using CudaStream = void*;                         // CUstream
using CudaEvent = void*;                          // CUevent
using CudaModule = void*;                         // CUmodule
using CudaFunction = void*;                       // CUfunction
using CudaUuid = std::array<uint8_t, 16>;         // CUuuid
using CudaIpcHandle = std::array<std::byte, 64>;  // CUipcMemHandle, cudaIpcMemHandle_t

// CUresult. Any other value may come; only these are told apart.
using CudaResult = int;
inline constexpr CudaResult kCudaSuccess = 0;
inline constexpr CudaResult kCudaInvalidValue = 1;
inline constexpr CudaResult kCudaOutOfMemory = 2;
inline constexpr CudaResult kCudaNotInitialized = 3;
inline constexpr CudaResult kCudaNoDevice = 100;
inline constexpr CudaResult kCudaInvalidDevice = 101;
inline constexpr CudaResult kCudaInvalidContext = 201;
inline constexpr CudaResult kCudaMapFailed = 205;
inline constexpr CudaResult kCudaInvalidHandle = 400;
inline constexpr CudaResult kCudaNotFound = 500;
inline constexpr CudaResult kCudaNotReady = 600;
inline constexpr CudaResult kCudaIllegalAddress = 700;
inline constexpr CudaResult kCudaNotPermitted = 800;
inline constexpr CudaResult kCudaNotSupported = 801;

// CUdevice_attribute.
inline constexpr int kCudaAttributeMultiprocessorCount = 16;
inline constexpr int kCudaAttributeComputeCapabilityMajor = 75;
inline constexpr int kCudaAttributeComputeCapabilityMinor = 76;
inline constexpr int kCudaAttributeOneAddressForPinnedMemory = 91;  // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
inline constexpr int kCudaAttributeVirtualMemoryManagement = 102;
inline constexpr int kCudaAttributePosixFdHandles = 103;

// CUmemLocation, with CU_MEM_LOCATION_TYPE_DEVICE.
inline constexpr int kCudaLocationDevice = 1;
struct CudaMemLocation {
  int type = kCudaLocationDevice;
  int id = 0;  // a CudaDevice; negative in the properties of memory on a device that this process does not see
};

// CUmemAllocationProp, with CU_MEM_ALLOCATION_TYPE_PINNED and CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.
inline constexpr int kCudaAllocationPinned = 1;
inline constexpr int kCudaHandlePosixFd = 1;
struct CudaAllocationProp {
  int type = kCudaAllocationPinned;
  int requested_handle_types = kCudaHandlePosixFd;
  CudaMemLocation location;
  void* win32_handle_meta_data = nullptr;
  struct {
    unsigned char compression_type = 0;
    unsigned char gpu_direct_rdma_capable = 0;
    uint16_t usage = 0;
    unsigned char reserved[4] = {};
  } flags;
};

// CUmemAccess_flags and CUmemAccessDesc.
enum class CudaAccess : int { kNone = 0, kRead = 1, kReadWrite = 3 };
struct CudaAccessDesc {
  CudaMemLocation location;
  CudaAccess flags = CudaAccess::kRead;
};

// CUmemorytype, and the CUpointer_attributes that ask for it and for the device.
inline constexpr int kCudaMemoryHost = 1;
inline constexpr int kCudaMemoryDevice = 2;
inline constexpr int kCudaPointerAttributeMemoryType = 2;
inline constexpr int kCudaPointerAttributeDeviceOrdinal = 9;

inline constexpr unsigned kCudaStreamDefault = 0;  // CU_STREAM_DEFAULT: waits for the default stream's work
inline constexpr unsigned kCudaHostRegisterPortable = 1;
inline constexpr unsigned kCudaHostAllocPortable = 1;   // CU_MEMHOSTALLOC_PORTABLE: pinned for every context
inline constexpr unsigned kCudaStreamNonBlocking = 1;   // CU_STREAM_NON_BLOCKING
inline constexpr unsigned kCudaEventDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING
inline constexpr unsigned kCudaIpcLazyPeerAccess = 1;   // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
inline constexpr int kCudaGranularityMinimum = 0;       // CU_MEM_ALLOC_GRANULARITY_MINIMUM

// A matrix of bytes that is copied from the host to the device: `rows` rows of `row_bytes`, each so far from the one
// before it.
struct CudaRows {
  CudaDevicePtr to = 0;
  size_t to_pitch = 0;
  const void* from = nullptr;
  size_t from_pitch = 0;
  size_t row_bytes = 0;
  size_t rows = 0;
};

struct CudaLaunch {
  unsigned grid_blocks = 1;
  unsigned block_threads = 1;
};

class CudaDriver {
 public:
  virtual ~CudaDriver() = default;

  virtual CudaResult Init() = 0;  // with flags 0
  virtual CudaResult DriverGetVersion(int* version) = 0;
  virtual CudaResult DeviceGetCount(int* count) = 0;
  virtual CudaResult DeviceGet(int ordinal, CudaDevice* device) = 0;
  virtual CudaResult DeviceGetUuid(CudaDevice device, CudaUuid* uuid) = 0;
  virtual CudaResult DeviceGetName(CudaDevice device, std::string* name) = 0;
  virtual CudaResult DeviceGetAttribute(CudaDevice device, int attribute, int* value) = 0;

  virtual CudaResult DevicePrimaryCtxRetain(CudaDevice device, CudaContextHandle* context) = 0;
  virtual CudaResult DevicePrimaryCtxRelease(CudaDevice device) = 0;
  virtual CudaResult DevicePrimaryCtxGetState(CudaDevice device, unsigned* flags, int* active) = 0;
  virtual CudaResult CtxPushCurrent(CudaContextHandle context) = 0;
  virtual CudaResult CtxPopCurrent(CudaContextHandle* context) = 0;
  virtual CudaResult CtxGetCurrent(CudaContextHandle* context) = 0;
  virtual CudaResult CtxGetDevice(CudaDevice* device) = 0;
  virtual CudaResult CtxSynchronize() = 0;

  virtual CudaResult MemGetInfo(size_t* free_bytes, size_t* total_bytes) = 0;
  virtual CudaResult MemGetAllocationGranularity(const CudaAllocationProp& prop, int option, size_t* granularity) = 0;
  virtual CudaResult MemCreate(size_t size_bytes, const CudaAllocationProp& prop, CudaMemHandle* handle) = 0;
  virtual CudaResult MemRelease(CudaMemHandle handle) = 0;
  virtual CudaResult MemExportToFd(CudaMemHandle handle, int* fd) = 0;  // cuMemExportToShareableHandle
  virtual CudaResult MemImportFromFd(int fd,
                                     CudaMemHandle* handle) = 0;  // cuMemImportFromShareableHandle; fd stays open
  virtual CudaResult MemGetAllocationPropertiesFromHandle(CudaMemHandle handle, CudaAllocationProp* prop) = 0;
  virtual CudaResult MemAddressReserve(size_t size_bytes, size_t alignment, CudaDevicePtr* address) = 0;
  virtual CudaResult MemAddressFree(CudaDevicePtr address, size_t size_bytes) = 0;
  virtual CudaResult MemMap(CudaDevicePtr address, size_t size_bytes, CudaMemHandle handle) = 0;
  virtual CudaResult MemUnmap(CudaDevicePtr address, size_t size_bytes) = 0;
  virtual CudaResult MemSetAccess(CudaDevicePtr address, size_t size_bytes, const CudaAccessDesc& access) = 0;

  virtual CudaResult MemAlloc(size_t size_bytes, CudaDevicePtr* address) = 0;
  virtual CudaResult MemFree(CudaDevicePtr address) = 0;
  virtual CudaResult IpcGetMemHandle(CudaDevicePtr address, CudaIpcHandle* handle) = 0;
  virtual CudaResult IpcOpenMemHandle(const CudaIpcHandle& handle, unsigned flags, CudaDevicePtr* address) = 0;
  virtual CudaResult IpcCloseMemHandle(CudaDevicePtr address) = 0;

  // What the driver says of an address: kCudaMemoryHost, kCudaMemoryDevice. kCudaInvalidValue for memory that it does
  // not know, such as malloc's. With cuPointerGetAttribute.
  virtual CudaResult PointerGetMemoryType(CudaDevicePtr address, int* type) = 0;
  // On which device it is. Of memory that was opened by its CUDA IPC handle the driver says the device of the context
  // that opened it, though it be another one's (580.159, two H200). With cuPointerGetAttribute.
  virtual CudaResult PointerGetDevice(CudaDevicePtr address, CudaDevice* device) = 0;
  // The allocation that an address lies in, also if another process made it; needs a context of that memory's.
  virtual CudaResult MemGetAddressRange(CudaDevicePtr address, CudaDevicePtr* base, size_t* size_bytes) = 0;

  virtual CudaResult MemHostAlloc(size_t size_bytes, unsigned flags, void** data) = 0;
  virtual CudaResult MemFreeHost(void* data) = 0;
  virtual CudaResult MemHostRegister(void* data, size_t size_bytes, unsigned flags) = 0;  // pins memory that is there
  virtual CudaResult MemHostUnregister(void* data) = 0;

  virtual CudaResult StreamCreate(unsigned flags, CudaStream* stream) = 0;
  virtual CudaResult StreamDestroy(CudaStream stream) = 0;
  virtual CudaResult StreamSynchronize(CudaStream stream) = 0;
  virtual CudaResult StreamWaitEvent(CudaStream stream, CudaEvent event) = 0;  // what comes after waits for it
  virtual CudaResult EventCreate(unsigned flags, CudaEvent* event) = 0;
  virtual CudaResult EventDestroy(CudaEvent event) = 0;
  virtual CudaResult EventRecord(CudaEvent event, CudaStream stream) = 0;
  virtual CudaResult EventSynchronize(CudaEvent event) = 0;

  virtual CudaResult MemcpyHtoDAsync(CudaDevicePtr to, const void* from, size_t size_bytes, CudaStream stream) = 0;
  virtual CudaResult MemcpyHtoDRowsAsync(const CudaRows& rows, CudaStream stream) = 0;  // cuMemcpy2DAsync
  virtual CudaResult MemcpyDtoHAsync(void* to, CudaDevicePtr from, size_t size_bytes, CudaStream stream) = 0;
  virtual CudaResult MemcpyDtoDAsync(CudaDevicePtr to, CudaDevicePtr from, size_t size_bytes, CudaStream stream) = 0;
  virtual CudaResult MemsetD8Async(CudaDevicePtr to, uint8_t value, size_t size_bytes, CudaStream stream) = 0;

  virtual CudaResult ModuleLoadData(const void* image, CudaModule* module) = 0;
  virtual CudaResult ModuleUnload(CudaModule module) = 0;
  virtual CudaResult ModuleGetFunction(CudaModule module, const char* name, CudaFunction* function) = 0;
  // `parameters` points to each of the kernel's parameters, in their order.
  virtual CudaResult LaunchKernel(CudaFunction function, const CudaLaunch& launch, CudaStream stream,
                                  void** parameters) = 0;

  virtual std::string ErrorName(CudaResult result) = 0;    // "CUDA_ERROR_OUT_OF_MEMORY"
  virtual std::string ErrorString(CudaResult result) = 0;  // "out of memory"
};

// The driver of this machine, opened and initialized by the first call and kept for the life of the process: the same
// object for everyone. GPU_UNAVAILABLE if there is no libcuda.so.1, no GPU, or initialization fails, saying which;
// DRIVER_TOO_OLD if it lacks a call that is needed, naming that and the version. Thread-safe. Never fork after it.
absl::StatusOr<CudaDriver*> LoadCudaDriver();

// What a call that failed comes to: CUDA_ERROR with `call`, the result's name and number, and `doing` (a phrase for
// people, "mapping slab 0"); MEMORY_EXHAUSTED for kCudaOutOfMemory. `call` is CUDA's name of the function.
absl::Status CudaError(CudaDriver& driver, CudaResult result, const char* call, const std::string& doing);

// "GPU-8-4-4-4-12" in lower-case hexadecimal digits, as NVML and nvidia-smi spell it.
std::string FormatGpuUuid(const CudaUuid& uuid);

}  // namespace weightbroker
