// A CUDA driver in host memory, for tests on machines without a GPU, that can be told to fail.
//
//   FakeCudaDriver cuda({{.uuid = FakeGpuUuid(1), .total_bytes = 1 << 30}});
//   cuda.Fail("cuMemCreate", kCudaNotPermitted);                 // the next call of it, and the ones after
//   ... what is tested ...
//   EXPECT_EQ(cuda.live_objects(), 0) << cuda.DescribeLive();    // nothing was left behind
//
// It does what the driver does as far as callers can tell, and punishes what the driver punishes: copies and kernels on
// a stream happen as late as they may, when somebody waits for them, so that a buffer which is used again too early is
// found; calls that need a current context fail without one. VMM memory is a memfd, whose descriptors other processes
// can import; memory of cuMemAlloc can be opened by its handle in this process, and for others is stale.
//
// Thread-safe, but tell it what to do before there are threads.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "common/base/mutex.h"
#include "common/base/unique_fd.h"
#include "common/device/cuda_driver.h"

namespace weightbroker::testing {

// "GPU-00000001-0000-0000-0000-000000000000" for 1.
std::string FakeGpuUuid(int number);

struct FakeGpu {
  std::string uuid = FakeGpuUuid(1);
  std::string name = "Fake GPU";
  int64_t total_bytes = int64_t{1} << 30;
  bool has_posix_fds = true;
  bool visible = true;  // to this process, as by CUDA_VISIBLE_DEVICES; ordinals count visible ones only
};

class FakeCudaDriver : public CudaDriver {
 public:
  explicit FakeCudaDriver(std::vector<FakeGpu> gpus = {FakeGpu{}});
  ~FakeCudaDriver() override;

  // From now on, or after `after` more calls of it that succeed, `call` ("cuMemCreate") gives `result`.
  void Fail(const std::string& call, CudaResult result, int after = 0);
  void StopFailing(const std::string& call);
  // As after an illegal access: every later call that needs a context gives `result`.
  void BreakContext(CudaResult result);

  int CallCount(const std::string& call) const;
  // Contexts, handles, mappings, reservations, allocations, pinned buffers, streams, events and modules there are.
  int live_objects() const;
  std::string DescribeLive() const;
  // Of VMM memory and cuMemAlloc together.
  int64_t used_bytes() const;

  // Host memory of its owner's that is pinned: how many runs, and how much of it there can be, without end at first.
  int registered_runs() const;
  void LimitRegisteredBytes(int64_t most_bytes);

  static constexpr int64_t kGranularityBytes = 2 << 20;

  CudaResult Init() override;
  CudaResult DriverGetVersion(int* version) override;
  CudaResult DeviceGetCount(int* count) override;
  CudaResult DeviceGet(int ordinal, CudaDevice* device) override;
  CudaResult DeviceGetUuid(CudaDevice device, CudaUuid* uuid) override;
  CudaResult DeviceGetName(CudaDevice device, std::string* name) override;
  CudaResult DeviceGetAttribute(CudaDevice device, int attribute, int* value) override;
  CudaResult DevicePrimaryCtxRetain(CudaDevice device, CudaContextHandle* context) override;
  CudaResult DevicePrimaryCtxRelease(CudaDevice device) override;
  CudaResult DevicePrimaryCtxGetState(CudaDevice device, unsigned* flags, int* active) override;
  CudaResult CtxPushCurrent(CudaContextHandle context) override;
  CudaResult CtxPopCurrent(CudaContextHandle* context) override;
  CudaResult CtxGetCurrent(CudaContextHandle* context) override;
  CudaResult CtxGetDevice(CudaDevice* device) override;
  CudaResult CtxSynchronize() override;
  CudaResult MemGetInfo(size_t* free_bytes, size_t* total_bytes) override;
  CudaResult MemGetAllocationGranularity(const CudaAllocationProp& prop, int option, size_t* granularity) override;
  CudaResult MemCreate(size_t size_bytes, const CudaAllocationProp& prop, CudaMemHandle* handle) override;
  CudaResult MemRelease(CudaMemHandle handle) override;
  CudaResult MemExportToFd(CudaMemHandle handle, int* fd) override;
  CudaResult MemImportFromFd(int fd, CudaMemHandle* handle) override;
  CudaResult MemGetAllocationPropertiesFromHandle(CudaMemHandle handle, CudaAllocationProp* prop) override;
  CudaResult MemAddressReserve(size_t size_bytes, size_t alignment, CudaDevicePtr* address) override;
  CudaResult MemAddressFree(CudaDevicePtr address, size_t size_bytes) override;
  CudaResult MemMap(CudaDevicePtr address, size_t size_bytes, CudaMemHandle handle) override;
  CudaResult MemUnmap(CudaDevicePtr address, size_t size_bytes) override;
  CudaResult MemSetAccess(CudaDevicePtr address, size_t size_bytes, const CudaAccessDesc& access) override;
  CudaResult MemAlloc(size_t size_bytes, CudaDevicePtr* address) override;
  CudaResult MemFree(CudaDevicePtr address) override;
  CudaResult IpcGetMemHandle(CudaDevicePtr address, CudaIpcHandle* handle) override;
  CudaResult IpcOpenMemHandle(const CudaIpcHandle& handle, unsigned flags, CudaDevicePtr* address) override;
  CudaResult IpcCloseMemHandle(CudaDevicePtr address) override;
  CudaResult PointerGetMemoryType(CudaDevicePtr address, int* type) override;
  CudaResult PointerGetDevice(CudaDevicePtr address, CudaDevice* device) override;
  CudaResult MemGetAddressRange(CudaDevicePtr address, CudaDevicePtr* base, size_t* size_bytes) override;
  CudaResult MemHostAlloc(size_t size_bytes, unsigned flags, void** data) override;
  CudaResult MemFreeHost(void* data) override;
  CudaResult MemHostRegister(void* data, size_t size_bytes, unsigned flags) override;
  CudaResult MemHostUnregister(void* data) override;
  CudaResult StreamCreate(unsigned flags, CudaStream* stream) override;
  CudaResult StreamDestroy(CudaStream stream) override;
  CudaResult StreamSynchronize(CudaStream stream) override;
  CudaResult StreamWaitEvent(CudaStream stream, CudaEvent event) override;
  CudaResult EventCreate(unsigned flags, CudaEvent* event) override;
  CudaResult EventDestroy(CudaEvent event) override;
  CudaResult EventRecord(CudaEvent event, CudaStream stream) override;
  CudaResult EventSynchronize(CudaEvent event) override;
  CudaResult MemcpyHtoDAsync(CudaDevicePtr to, const void* from, size_t size_bytes, CudaStream stream) override;
  CudaResult MemcpyHtoDRowsAsync(const CudaRows& rows, CudaStream stream) override;
  CudaResult MemcpyDtoHAsync(void* to, CudaDevicePtr from, size_t size_bytes, CudaStream stream) override;
  CudaResult MemcpyDtoDAsync(CudaDevicePtr to, CudaDevicePtr from, size_t size_bytes, CudaStream stream) override;
  CudaResult MemsetD8Async(CudaDevicePtr to, uint8_t value, size_t size_bytes, CudaStream stream) override;
  CudaResult ModuleLoadData(const void* image, CudaModule* module) override;
  CudaResult ModuleUnload(CudaModule module) override;
  CudaResult ModuleGetFunction(CudaModule module, const char* name, CudaFunction* function) override;
  CudaResult LaunchKernel(CudaFunction function, const CudaLaunch& launch, CudaStream stream,
                          void** parameters) override;
  std::string ErrorName(CudaResult result) override;
  std::string ErrorString(CudaResult result) override;

 private:
  struct Failure {
    CudaResult result = kCudaSuccess;
    int after = 0;
  };
  struct Physical {
    UniqueFd fd;
    size_t size_bytes = 0;
    bool made_here = false;  // counts in used_bytes_
  };
  struct Range {
    size_t size_bytes = 0;
    CudaDevice device = 0;
  };
  using Ranges = std::map<CudaDevicePtr, Range>;
  struct Stream {
    CudaDevice device = 0;
    std::deque<std::function<void()>> work;
    int64_t done = 0;  // of the work that was ever queued
  };
  struct Event {
    CudaStream stream = nullptr;
    int64_t position = 0;  // in the stream's work
  };

  // What `call` gives before it does anything; counts it.
  CudaResult Enter(const char* call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  CudaResult EnterWithContext(const char* call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  const FakeGpu* Find(CudaDevice device) const;
  CudaDevice DeviceWithUuid(const std::string& uuid) const;  // -2 if it is not visible
  // The mapping or allocation that an address lies in; null if there is none.
  const Ranges::value_type* FindRange(CudaDevicePtr address) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  CudaResult Enqueue(CudaStream stream, std::function<void()> work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunUntil(Stream& stream, int64_t position) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void* NewObject() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::vector<FakeGpu> gpus_;
  std::vector<const FakeGpu*> visible_;  // by ordinal

  mutable Mutex mutex_;
  std::map<std::string, Failure> failures_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, int> calls_ ABSL_GUARDED_BY(mutex_);
  CudaResult broken_ ABSL_GUARDED_BY(mutex_) = kCudaSuccess;
  uint64_t last_object_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<CudaDevice, int> contexts_ ABSL_GUARDED_BY(mutex_);  // how often each is retained
  std::map<CudaMemHandle, Physical> physical_ ABSL_GUARDED_BY(mutex_);
  std::map<CudaDevicePtr, size_t> reservations_ ABSL_GUARDED_BY(mutex_);
  Ranges mappings_ ABSL_GUARDED_BY(mutex_);
  Ranges allocations_ ABSL_GUARDED_BY(mutex_);
  std::multiset<CudaDevicePtr> opened_ ABSL_GUARDED_BY(mutex_);  // by IPC handle
  std::set<void*> pinned_ ABSL_GUARDED_BY(mutex_);
  int64_t most_registered_bytes_ ABSL_GUARDED_BY(mutex_) = INT64_MAX;
  std::map<CudaDevicePtr, size_t> registered_ ABSL_GUARDED_BY(mutex_);  // host memory that its owner has pinned
  std::map<CudaStream, Stream> streams_ ABSL_GUARDED_BY(mutex_);
  std::map<CudaEvent, Event> events_ ABSL_GUARDED_BY(mutex_);
  std::set<CudaModule> modules_ ABSL_GUARDED_BY(mutex_);
  std::map<CudaFunction, std::string> functions_ ABSL_GUARDED_BY(mutex_);  // names of kernels
  int64_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace weightbroker::testing
