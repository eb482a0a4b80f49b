#include "tests/support/fake_cuda_driver.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/device/kernels/copy_runs.h"
#include "common/device/kernels/digest_tiles.h"
#include "common/device/kernels/scatter_runs.h"
#include "common/quant/fp8_block_tile.h"
#include "tests/support/play_fp8_kernel.h"

namespace weightbroker::testing {
namespace {

constexpr char kMemfdPrefix[] = "fake-gpu:";
constexpr size_t kPageBytes = 4096;

// Contexts that are current in this thread, of any fake driver.
thread_local std::vector<CudaContextHandle> current_contexts;

void* Pointer(CudaDevicePtr address) { return reinterpret_cast<void*>(address); }
CudaDevicePtr Address(void* pointer) { return reinterpret_cast<CudaDevicePtr>(pointer); }
CudaContextHandle ContextOf(CudaDevice device) { return reinterpret_cast<void*>(static_cast<intptr_t>(device + 1)); }
CudaDevice DeviceOf(CudaContextHandle context) {
  return static_cast<CudaDevice>(reinterpret_cast<intptr_t>(context)) - 1;
}

struct IpcContents {
  pid_t pid;
  CudaDevicePtr address;
};
static_assert(sizeof(IpcContents) <= sizeof(CudaIpcHandle));

// The UUID of the GPU whose memory a descriptor is; empty if it is none's.
std::string UuidOfFd(int fd) {
  char target[256] = "";
  const std::string link = absl::StrCat("/proc/self/fd/", fd);
  const ssize_t size = readlink(link.c_str(), target, sizeof(target) - 1);
  const std::string prefix = absl::StrCat("/memfd:", kMemfdPrefix);
  const std::string text(target, static_cast<size_t>(std::max<ssize_t>(0, size)));
  if (text.compare(0, prefix.size(), prefix) != 0) return "";
  return text.substr(prefix.size(), FakeGpuUuid(0).size());
}

bool IsFp8Kernel(const std::string& name) {
  return name == kFp8KernelBf16 || name == kFp8KernelF16 || name == kFp8KernelF32;
}

void RunFp8Kernel(const std::string& name, const Fp8BlockLaunch& launch) {
  if (name == kFp8KernelBf16) return PlayFp8Kernel<Bf16Format>(launch);
  if (name == kFp8KernelF16) return PlayFp8Kernel<F16Format>(launch);
  PlayFp8Kernel<F32Format>(launch);
}

void RunDigestKernel(const wbd1::DigestRange* ranges, int64_t range_count, int64_t tile_count, uint64_t* lanes) {
  for (int64_t tile = 0; tile < tile_count; ++tile) {
    const int64_t index = wbd1::RangeOfTile(ranges, range_count, tile);
    for (unsigned thread = 0; thread < wbd1::kDigestThreads; ++thread) {
      wbd1::AddTile(ranges[index], tile, thread, wbd1::kDigestThreads, &lanes[2 * index]);
    }
  }
}

}  // namespace

std::string FakeGpuUuid(int number) {
  char text[64];
  std::snprintf(text, sizeof(text), "GPU-%08x-0000-0000-0000-000000000000", static_cast<unsigned>(number));
  return text;
}

FakeCudaDriver::FakeCudaDriver(std::vector<FakeGpu> gpus) : gpus_(std::move(gpus)) {
  for (const FakeGpu& gpu : gpus_) {
    if (gpu.visible) visible_.push_back(&gpu);
  }
}

FakeCudaDriver::~FakeCudaDriver() {
  for (void* const pinned : pinned_) std::free(pinned);
  for (const auto& [address, range] : allocations_) munmap(Pointer(address), range.size_bytes);
  for (const auto& [address, size] : reservations_) munmap(Pointer(address), size);
}

void FakeCudaDriver::Fail(const std::string& call, CudaResult result, int after) {
  MutexLock lock(mutex_);
  failures_[call] = {result, after};
}

void FakeCudaDriver::StopFailing(const std::string& call) {
  MutexLock lock(mutex_);
  failures_.erase(call);
}

void FakeCudaDriver::BreakContext(CudaResult result) {
  MutexLock lock(mutex_);
  broken_ = result;
}

int FakeCudaDriver::CallCount(const std::string& call) const {
  MutexLock lock(mutex_);
  const auto found = calls_.find(call);
  return found == calls_.end() ? 0 : found->second;
}

int FakeCudaDriver::live_objects() const {
  MutexLock lock(mutex_);
  int contexts = 0;
  for (const auto& [device, count] : contexts_) contexts += count;
  return contexts + static_cast<int>(physical_.size() + reservations_.size() + mappings_.size() + allocations_.size() +
                                     opened_.size() + pinned_.size() + registered_.size() + streams_.size() +
                                     events_.size() + modules_.size());
}

std::string FakeCudaDriver::DescribeLive() const {
  MutexLock lock(mutex_);
  return absl::StrCat("contexts ", contexts_.size(), ", handles ", physical_.size(), ", reservations ",
                      reservations_.size(), ", mappings ", mappings_.size(), ", allocations ", allocations_.size(),
                      ", opened ", opened_.size(), ", pinned ", pinned_.size() + registered_.size(), ", streams ",
                      streams_.size(), ", events ", events_.size(), ", modules ", modules_.size());
}

int64_t FakeCudaDriver::used_bytes() const {
  MutexLock lock(mutex_);
  return used_bytes_;
}

CudaResult FakeCudaDriver::Enter(const char* call) {
  ++calls_[call];
  const auto failure = failures_.find(call);
  if (failure == failures_.end() || failure->second.after-- > 0) return kCudaSuccess;
  failure->second.after = 0;
  return failure->second.result;
}

CudaResult FakeCudaDriver::EnterWithContext(const char* call) {
  if (const CudaResult result = Enter(call); result != kCudaSuccess) return result;
  if (current_contexts.empty()) return kCudaInvalidContext;
  return broken_;
}

const FakeGpu* FakeCudaDriver::Find(CudaDevice device) const {
  return device >= 0 && static_cast<size_t>(device) < visible_.size() ? visible_[static_cast<size_t>(device)] : nullptr;
}

CudaDevice FakeCudaDriver::DeviceWithUuid(const std::string& uuid) const {
  for (size_t ordinal = 0; ordinal < visible_.size(); ++ordinal) {
    if (visible_[ordinal]->uuid == uuid) return static_cast<CudaDevice>(ordinal);
  }
  return -2;
}

const FakeCudaDriver::Ranges::value_type* FakeCudaDriver::FindRange(CudaDevicePtr address) const {
  for (const Ranges* ranges : {&mappings_, &allocations_}) {
    const auto next = ranges->upper_bound(address);
    if (next == ranges->begin()) continue;
    const auto& range = *std::prev(next);
    if (address < range.first + range.second.size_bytes) return &range;
  }
  return nullptr;
}

void* FakeCudaDriver::NewObject() { return reinterpret_cast<void*>(++last_object_); }

CudaResult FakeCudaDriver::Init() {
  MutexLock lock(mutex_);
  return Enter("cuInit");
}

CudaResult FakeCudaDriver::DriverGetVersion(int* version) {
  *version = 13000;
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::DeviceGetCount(int* count) {
  MutexLock lock(mutex_);
  *count = static_cast<int>(visible_.size());
  return Enter("cuDeviceGetCount");
}

CudaResult FakeCudaDriver::DeviceGet(int ordinal, CudaDevice* device) {
  MutexLock lock(mutex_);
  *device = ordinal;
  return Find(ordinal) != nullptr ? Enter("cuDeviceGet") : kCudaInvalidDevice;
}

CudaResult FakeCudaDriver::DeviceGetUuid(CudaDevice device, CudaUuid* uuid) {
  const FakeGpu* const gpu = Find(device);
  if (gpu == nullptr) return kCudaInvalidDevice;
  std::string digits = gpu->uuid.substr(4);
  digits.erase(std::remove(digits.begin(), digits.end(), '-'), digits.end());
  for (size_t i = 0; i < uuid->size(); ++i) {
    (*uuid)[i] = static_cast<uint8_t>(std::stoul(digits.substr(2 * i, 2), nullptr, 16));
  }
  MutexLock lock(mutex_);
  return Enter("cuDeviceGetUuid");
}

CudaResult FakeCudaDriver::DeviceGetName(CudaDevice device, std::string* name) {
  if (Find(device) == nullptr) return kCudaInvalidDevice;
  *name = Find(device)->name;
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::DeviceGetAttribute(CudaDevice device, int attribute, int* value) {
  const FakeGpu* const gpu = Find(device);
  if (gpu == nullptr) return kCudaInvalidDevice;
  switch (attribute) {
    case kCudaAttributePosixFdHandles:
      *value = gpu->has_posix_fds ? 1 : 0;
      break;
    case kCudaAttributeComputeCapabilityMajor:
      *value = 9;
      break;
    case kCudaAttributeComputeCapabilityMinor:
      *value = 0;
      break;
    default:
      *value = 1;
  }
  MutexLock lock(mutex_);
  return Enter("cuDeviceGetAttribute");
}

CudaResult FakeCudaDriver::DevicePrimaryCtxRetain(CudaDevice device, CudaContextHandle* context) {
  MutexLock lock(mutex_);
  if (Find(device) == nullptr) return kCudaInvalidDevice;
  if (const CudaResult result = Enter("cuDevicePrimaryCtxRetain"); result != kCudaSuccess) return result;
  ++contexts_[device];
  *context = ContextOf(device);
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::DevicePrimaryCtxRelease(CudaDevice device) {
  MutexLock lock(mutex_);
  const auto found = contexts_.find(device);
  if (found == contexts_.end()) return kCudaInvalidContext;
  if (--found->second == 0) contexts_.erase(found);
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::DevicePrimaryCtxGetState(CudaDevice device, unsigned* flags, int* active) {
  MutexLock lock(mutex_);
  *flags = 0;
  *active = contexts_.count(device) > 0 ? 1 : 0;
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::CtxPushCurrent(CudaContextHandle context) {
  MutexLock lock(mutex_);
  if (contexts_.count(DeviceOf(context)) == 0) return kCudaInvalidContext;
  if (const CudaResult result = Enter("cuCtxPushCurrent"); result != kCudaSuccess) return result;
  current_contexts.push_back(context);
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::CtxPopCurrent(CudaContextHandle* context) {
  if (current_contexts.empty()) return kCudaInvalidContext;
  *context = current_contexts.back();
  current_contexts.pop_back();
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::CtxGetCurrent(CudaContextHandle* context) {
  *context = current_contexts.empty() ? nullptr : current_contexts.back();
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::CtxGetDevice(CudaDevice* device) {
  if (current_contexts.empty()) return kCudaInvalidContext;
  *device = DeviceOf(current_contexts.back());
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::CtxSynchronize() {
  MutexLock lock(mutex_);
  for (auto& [handle, stream] : streams_) {
    const bool is_current = !current_contexts.empty() && stream.device == DeviceOf(current_contexts.back());
    if (is_current) RunUntil(stream, stream.done + static_cast<int64_t>(stream.work.size()));
  }
  return EnterWithContext("cuCtxSynchronize");
}

CudaResult FakeCudaDriver::MemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  MutexLock lock(mutex_);
  if (const CudaResult result = EnterWithContext("cuMemGetInfo"); result != kCudaSuccess) return result;
  const FakeGpu* const gpu = Find(DeviceOf(current_contexts.back()));
  *total_bytes = static_cast<size_t>(gpu->total_bytes);
  *free_bytes = static_cast<size_t>(gpu->total_bytes - used_bytes_);
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::MemGetAllocationGranularity(const CudaAllocationProp&, int, size_t* granularity) {
  MutexLock lock(mutex_);
  *granularity = kGranularityBytes;
  return Enter("cuMemGetAllocationGranularity");
}

CudaResult FakeCudaDriver::MemCreate(size_t size_bytes, const CudaAllocationProp& prop, CudaMemHandle* handle) {
  MutexLock lock(mutex_);
  if (const CudaResult result = Enter("cuMemCreate"); result != kCudaSuccess) return result;
  const FakeGpu* const gpu = Find(prop.location.id);
  if (gpu == nullptr) return kCudaInvalidDevice;
  if (size_bytes == 0 || size_bytes % kGranularityBytes != 0) return kCudaInvalidValue;
  if (used_bytes_ + static_cast<int64_t>(size_bytes) > gpu->total_bytes) return kCudaOutOfMemory;
  UniqueFd fd(memfd_create(absl::StrCat(kMemfdPrefix, gpu->uuid).c_str(), MFD_CLOEXEC));
  if (!fd.valid() || ftruncate(fd.get(), static_cast<off_t>(size_bytes)) != 0) return kCudaOutOfMemory;
  *handle = ++last_object_;
  physical_[*handle] = {std::move(fd), size_bytes, true};
  used_bytes_ += static_cast<int64_t>(size_bytes);
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::MemRelease(CudaMemHandle handle) {
  MutexLock lock(mutex_);
  const auto found = physical_.find(handle);
  if (found == physical_.end()) return kCudaInvalidValue;
  if (found->second.made_here) used_bytes_ -= static_cast<int64_t>(found->second.size_bytes);
  physical_.erase(found);
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::MemExportToFd(CudaMemHandle handle, int* fd) {
  MutexLock lock(mutex_);
  if (const CudaResult result = Enter("cuMemExportToShareableHandle"); result != kCudaSuccess) return result;
  const auto found = physical_.find(handle);
  if (found == physical_.end()) return kCudaInvalidValue;
  *fd = dup(found->second.fd.get());  // like the driver's, not close-on-exec
  return *fd >= 0 ? kCudaSuccess : kCudaOutOfMemory;
}

CudaResult FakeCudaDriver::MemImportFromFd(int fd, CudaMemHandle* handle) {
  MutexLock lock(mutex_);
  if (const CudaResult result = Enter("cuMemImportFromShareableHandle"); result != kCudaSuccess) return result;
  struct stat status {};
  if (fstat(fd, &status) != 0 || UuidOfFd(fd).empty()) return kCudaInvalidValue;
  *handle = ++last_object_;
  physical_[*handle] = {UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 0)), static_cast<size_t>(status.st_size), false};
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::MemGetAllocationPropertiesFromHandle(CudaMemHandle handle, CudaAllocationProp* prop) {
  MutexLock lock(mutex_);
  if (const CudaResult result = Enter("cuMemGetAllocationPropertiesFromHandle"); result != kCudaSuccess) return result;
  const auto found = physical_.find(handle);
  if (found == physical_.end()) return kCudaInvalidValue;
  const std::string uuid = UuidOfFd(found->second.fd.get());
  *prop = {};
  prop->location.id = DeviceWithUuid(uuid);
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::MemAddressReserve(size_t size_bytes, size_t, CudaDevicePtr* address) {
  MutexLock lock(mutex_);
  if (const CudaResult result = Enter("cuMemAddressReserve"); result != kCudaSuccess) return result;
  if (size_bytes == 0 || size_bytes % kGranularityBytes != 0) return kCudaInvalidValue;
  void* const data = mmap(nullptr, size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return kCudaOutOfMemory;
  *address = Address(data);
  reservations_[*address] = size_bytes;
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::MemAddressFree(CudaDevicePtr address, size_t size_bytes) {
  MutexLock lock(mutex_);
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second != size_bytes) return kCudaInvalidValue;
  munmap(Pointer(address), size_bytes);
  reservations_.erase(found);
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::MemMap(CudaDevicePtr address, size_t size_bytes, CudaMemHandle handle) {
  MutexLock lock(mutex_);
  if (const CudaResult result = Enter("cuMemMap"); result != kCudaSuccess) return result;
  const auto found = physical_.find(handle);
  if (found == physical_.end() || found->second.size_bytes != size_bytes) return kCudaInvalidValue;
  if (mmap(Pointer(address), size_bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.fd.get(), 0) == MAP_FAILED) {
    return kCudaMapFailed;
  }
  mappings_[address] = {size_bytes, DeviceWithUuid(UuidOfFd(found->second.fd.get()))};
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::MemUnmap(CudaDevicePtr address, size_t size_bytes) {
  MutexLock lock(mutex_);
  const auto found = mappings_.find(address);
  if (found == mappings_.end() || found->second.size_bytes != size_bytes) return kCudaInvalidValue;
  mmap(Pointer(address), size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  mappings_.erase(found);
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::MemSetAccess(CudaDevicePtr address, size_t size_bytes, const CudaAccessDesc& access) {
  MutexLock lock(mutex_);
  if (const CudaResult result = Enter("cuMemSetAccess"); result != kCudaSuccess) return result;
  const int allowed = access.flags == CudaAccess::kReadWrite ? PROT_READ | PROT_WRITE
                      : access.flags == CudaAccess::kRead    ? PROT_READ
                                                             : PROT_NONE;
  return mprotect(Pointer(address), size_bytes, allowed) == 0 ? kCudaSuccess : kCudaInvalidValue;
}

CudaResult FakeCudaDriver::MemAlloc(size_t size_bytes, CudaDevicePtr* address) {
  MutexLock lock(mutex_);
  if (const CudaResult result = EnterWithContext("cuMemAlloc"); result != kCudaSuccess) return result;
  const FakeGpu* const gpu = Find(DeviceOf(current_contexts.back()));
  if (used_bytes_ + static_cast<int64_t>(size_bytes) > gpu->total_bytes) return kCudaOutOfMemory;
  void* const data = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return kCudaOutOfMemory;
  *address = Address(data);
  allocations_[*address] = {size_bytes, DeviceOf(current_contexts.back())};
  used_bytes_ += static_cast<int64_t>(size_bytes);
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::MemFree(CudaDevicePtr address) {
  MutexLock lock(mutex_);
  const auto found = allocations_.find(address);
  if (found == allocations_.end()) return kCudaInvalidValue;
  used_bytes_ -= static_cast<int64_t>(found->second.size_bytes);
  munmap(Pointer(address), found->second.size_bytes);
  allocations_.erase(found);
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::IpcGetMemHandle(CudaDevicePtr address, CudaIpcHandle* handle) {
  MutexLock lock(mutex_);
  if (const CudaResult result = EnterWithContext("cuIpcGetMemHandle"); result != kCudaSuccess) return result;
  if (allocations_.count(address) == 0) return kCudaInvalidValue;
  const IpcContents contents = {getpid(), address};
  *handle = {};
  std::memcpy(handle->data(), &contents, sizeof(contents));
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::IpcOpenMemHandle(const CudaIpcHandle& handle, unsigned, CudaDevicePtr* address) {
  MutexLock lock(mutex_);
  if (const CudaResult result = EnterWithContext("cuIpcOpenMemHandle"); result != kCudaSuccess) return result;
  IpcContents contents;
  std::memcpy(&contents, handle.data(), sizeof(contents));
  if (contents.pid != getpid() || allocations_.count(contents.address) == 0) return kCudaInvalidHandle;
  *address = contents.address;
  opened_.insert(*address);
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::IpcCloseMemHandle(CudaDevicePtr address) {
  MutexLock lock(mutex_);
  const auto found = opened_.find(address);
  if (found == opened_.end()) return kCudaInvalidValue;
  opened_.erase(found);
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::PointerGetMemoryType(CudaDevicePtr address, int* type) {
  MutexLock lock(mutex_);
  if (const CudaResult result = EnterWithContext("cuPointerGetAttribute"); result != kCudaSuccess) return result;
  *type = kCudaMemoryDevice;
  if (FindRange(address) != nullptr) return kCudaSuccess;
  *type = kCudaMemoryHost;
  const auto next = registered_.upper_bound(address);
  const bool is_registered = next != registered_.begin() && address < std::prev(next)->first + std::prev(next)->second;
  return is_registered || pinned_.count(Pointer(address)) > 0 ? kCudaSuccess : kCudaInvalidValue;
}

CudaResult FakeCudaDriver::PointerGetDevice(CudaDevicePtr address, CudaDevice* device) {
  MutexLock lock(mutex_);
  if (const CudaResult result = EnterWithContext("cuPointerGetAttribute"); result != kCudaSuccess) return result;
  const auto* const range = FindRange(address);
  if (range == nullptr) return kCudaInvalidValue;
  *device = range->second.device;
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::MemGetAddressRange(CudaDevicePtr address, CudaDevicePtr* base, size_t* size_bytes) {
  MutexLock lock(mutex_);
  if (const CudaResult result = EnterWithContext("cuMemGetAddressRange"); result != kCudaSuccess) return result;
  const auto* const range = FindRange(address);
  if (range == nullptr) return kCudaNotFound;
  *base = range->first;
  *size_bytes = range->second.size_bytes;
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::MemHostAlloc(size_t size_bytes, unsigned, void** data) {
  MutexLock lock(mutex_);
  if (const CudaResult result = EnterWithContext("cuMemHostAlloc"); result != kCudaSuccess) return result;
  *data = std::aligned_alloc(kPageBytes, (size_bytes + kPageBytes - 1) / kPageBytes * kPageBytes);
  if (*data == nullptr) return kCudaOutOfMemory;
  pinned_.insert(*data);
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::MemFreeHost(void* data) {
  MutexLock lock(mutex_);
  if (pinned_.erase(data) == 0) return kCudaInvalidValue;
  std::free(data);
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::MemHostRegister(void* data, size_t size_bytes, unsigned) {
  MutexLock lock(mutex_);
  if (const CudaResult result = EnterWithContext("cuMemHostRegister"); result != kCudaSuccess) return result;
  int64_t pinned_bytes = static_cast<int64_t>(size_bytes);
  for (const auto& [address, size] : registered_) pinned_bytes += static_cast<int64_t>(size);
  if (pinned_bytes > most_registered_bytes_) return kCudaOutOfMemory;
  return registered_.emplace(reinterpret_cast<CudaDevicePtr>(data), size_bytes).second ? kCudaSuccess
                                                                                       : kCudaInvalidValue;
}

CudaResult FakeCudaDriver::MemHostUnregister(void* data) {
  MutexLock lock(mutex_);
  return registered_.erase(reinterpret_cast<CudaDevicePtr>(data)) > 0 ? kCudaSuccess : kCudaInvalidValue;
}

int FakeCudaDriver::registered_runs() const {
  MutexLock lock(mutex_);
  return static_cast<int>(registered_.size());
}

void FakeCudaDriver::LimitRegisteredBytes(int64_t most_bytes) {
  MutexLock lock(mutex_);
  most_registered_bytes_ = most_bytes;
}

CudaResult FakeCudaDriver::StreamCreate(unsigned, CudaStream* stream) {
  MutexLock lock(mutex_);
  if (const CudaResult result = EnterWithContext("cuStreamCreate"); result != kCudaSuccess) return result;
  *stream = NewObject();
  streams_[*stream].device = DeviceOf(current_contexts.back());
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::StreamDestroy(CudaStream stream) {
  MutexLock lock(mutex_);
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return kCudaInvalidHandle;
  streams_.erase(found);  // what nobody has waited for is never done
  return kCudaSuccess;
}

void FakeCudaDriver::RunUntil(Stream& stream, int64_t position) {
  while (stream.done < position && !stream.work.empty()) {
    stream.work.front()();
    stream.work.pop_front();
    ++stream.done;
  }
}

CudaResult FakeCudaDriver::Enqueue(CudaStream stream, std::function<void()> work) {
  if (stream == nullptr) {  // the context's own, of which nobody may expect that it waits for the others
    work();
    return kCudaSuccess;
  }
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return kCudaInvalidHandle;
  found->second.work.push_back(std::move(work));
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::StreamSynchronize(CudaStream stream) {
  MutexLock lock(mutex_);
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return kCudaInvalidHandle;
  RunUntil(found->second, found->second.done + static_cast<int64_t>(found->second.work.size()));
  return EnterWithContext("cuStreamSynchronize");
}

CudaResult FakeCudaDriver::StreamWaitEvent(CudaStream stream, CudaEvent event) {
  MutexLock lock(mutex_);
  if (const CudaResult result = EnterWithContext("cuStreamWaitEvent"); result != kCudaSuccess) return result;
  const auto found = events_.find(event);
  if (found == events_.end()) return kCudaInvalidHandle;
  return Enqueue(stream, [this, recorded = found->second] {
    const auto other = streams_.find(recorded.stream);
    if (other != streams_.end()) RunUntil(other->second, recorded.position);
  });
}

CudaResult FakeCudaDriver::EventCreate(unsigned, CudaEvent* event) {
  MutexLock lock(mutex_);
  if (const CudaResult result = EnterWithContext("cuEventCreate"); result != kCudaSuccess) return result;
  *event = NewObject();
  events_[*event] = {};
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::EventDestroy(CudaEvent event) {
  MutexLock lock(mutex_);
  return events_.erase(event) > 0 ? kCudaSuccess : kCudaInvalidHandle;
}

CudaResult FakeCudaDriver::EventRecord(CudaEvent event, CudaStream stream) {
  MutexLock lock(mutex_);
  if (const CudaResult result = EnterWithContext("cuEventRecord"); result != kCudaSuccess) return result;
  const auto found = streams_.find(stream);
  if (found == streams_.end() || events_.count(event) == 0) return kCudaInvalidHandle;
  events_[event] = {stream, found->second.done + static_cast<int64_t>(found->second.work.size())};
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::EventSynchronize(CudaEvent event) {
  MutexLock lock(mutex_);
  const auto found = events_.find(event);
  if (found == events_.end()) return kCudaInvalidHandle;
  if (const auto stream = streams_.find(found->second.stream); stream != streams_.end()) {
    RunUntil(stream->second, found->second.position);
  }
  return EnterWithContext("cuEventSynchronize");
}

CudaResult FakeCudaDriver::MemcpyHtoDAsync(CudaDevicePtr to, const void* from, size_t size_bytes, CudaStream stream) {
  MutexLock lock(mutex_);
  if (const CudaResult result = EnterWithContext("cuMemcpyHtoDAsync"); result != kCudaSuccess) return result;
  return Enqueue(stream, [=] { std::memcpy(Pointer(to), from, size_bytes); });
}

CudaResult FakeCudaDriver::MemcpyHtoDRowsAsync(const CudaRows& rows, CudaStream stream) {
  MutexLock lock(mutex_);
  if (const CudaResult result = EnterWithContext("cuMemcpy2DAsync"); result != kCudaSuccess) return result;
  if (rows.row_bytes > rows.to_pitch || rows.row_bytes > rows.from_pitch) return kCudaInvalidValue;
  return Enqueue(stream, [=] {
    for (size_t row = 0; row < rows.rows; ++row) {
      std::memcpy(Pointer(rows.to + row * rows.to_pitch),
                  static_cast<const std::byte*>(rows.from) + row * rows.from_pitch, rows.row_bytes);
    }
  });
}

CudaResult FakeCudaDriver::MemcpyDtoHAsync(void* to, CudaDevicePtr from, size_t size_bytes, CudaStream stream) {
  MutexLock lock(mutex_);
  if (const CudaResult result = EnterWithContext("cuMemcpyDtoHAsync"); result != kCudaSuccess) return result;
  return Enqueue(stream, [=] { std::memcpy(to, Pointer(from), size_bytes); });
}

CudaResult FakeCudaDriver::MemcpyDtoDAsync(CudaDevicePtr to, CudaDevicePtr from, size_t size_bytes, CudaStream stream) {
  MutexLock lock(mutex_);
  if (const CudaResult result = EnterWithContext("cuMemcpyDtoDAsync"); result != kCudaSuccess) return result;
  return Enqueue(stream, [=] { std::memcpy(Pointer(to), Pointer(from), size_bytes); });
}

CudaResult FakeCudaDriver::MemsetD8Async(CudaDevicePtr to, uint8_t value, size_t size_bytes, CudaStream stream) {
  MutexLock lock(mutex_);
  if (const CudaResult result = EnterWithContext("cuMemsetD8Async"); result != kCudaSuccess) return result;
  return Enqueue(stream, [=] { std::memset(Pointer(to), value, size_bytes); });
}

CudaResult FakeCudaDriver::ModuleLoadData(const void* image, CudaModule* module) {
  MutexLock lock(mutex_);
  if (const CudaResult result = EnterWithContext("cuModuleLoadData"); result != kCudaSuccess) return result;
  if (image == nullptr) return kCudaInvalidValue;
  *module = NewObject();
  modules_.insert(*module);
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::ModuleUnload(CudaModule module) {
  MutexLock lock(mutex_);
  return modules_.erase(module) > 0 ? kCudaSuccess : kCudaInvalidHandle;
}

CudaResult FakeCudaDriver::ModuleGetFunction(CudaModule module, const char* name, CudaFunction* function) {
  MutexLock lock(mutex_);
  if (const CudaResult result = Enter("cuModuleGetFunction"); result != kCudaSuccess) return result;
  if (modules_.count(module) == 0) return kCudaInvalidHandle;
  const std::string text = name;
  if (text != wbd1::kDigestKernelName && text != kScatterKernelName && text != kCopyRunsKernelName &&
      !IsFp8Kernel(text)) {
    return kCudaNotFound;
  }
  *function = NewObject();
  functions_[*function] = text;
  return kCudaSuccess;
}

CudaResult FakeCudaDriver::LaunchKernel(CudaFunction function, const CudaLaunch& launch, CudaStream stream,
                                        void** parameters) {
  MutexLock lock(mutex_);
  if (const CudaResult result = EnterWithContext("cuLaunchKernel"); result != kCudaSuccess) return result;
  const auto name = functions_.find(function);
  if (name == functions_.end() || launch.grid_blocks == 0) return kCudaInvalidValue;
  if (name->second == kScatterKernelName) {
    const ScatterRuns runs = *static_cast<ScatterRuns*>(parameters[0]);
    return Enqueue(stream, [=] {
      for (int64_t i = 0; i < runs.run_count * runs.run_elements; ++i) ScatterElement(runs, i);
    });
  }
  if (name->second == kCopyRunsKernelName) {
    if (launch.block_threads != kCopyRunsThreads) return kCudaInvalidValue;
    const CopyRun* const runs = *static_cast<const CopyRun**>(parameters[0]);
    return Enqueue(stream, [runs, count = *static_cast<int64_t*>(parameters[1])] {
      for (int64_t i = 0; i < count; ++i) {
        for (unsigned lane = 0; lane < kCopyRunsLanes; ++lane) CopyPartOfRun(runs[i], lane, kCopyRunsLanes);
      }
    });
  }
  if (IsFp8Kernel(name->second)) {
    const Fp8BlockLaunch blocks = *static_cast<Fp8BlockLaunch*>(parameters[0]);
    if (launch.block_threads != kFp8Threads || launch.grid_blocks != blocks.BlockCount()) return kCudaInvalidValue;
    return Enqueue(stream, [kernel = name->second, blocks] { RunFp8Kernel(kernel, blocks); });
  }
  if (launch.block_threads != wbd1::kDigestThreads) return kCudaInvalidValue;
  const auto* const ranges =
      static_cast<const wbd1::DigestRange*>(Pointer(*static_cast<CudaDevicePtr*>(parameters[0])));
  const auto range_count = *static_cast<int64_t*>(parameters[1]);
  const auto tile_count = *static_cast<int64_t*>(parameters[2]);
  auto* const lanes = static_cast<uint64_t*>(Pointer(*static_cast<CudaDevicePtr*>(parameters[3])));
  return Enqueue(stream, [=] { RunDigestKernel(ranges, range_count, tile_count, lanes); });
}

std::string FakeCudaDriver::ErrorName(CudaResult result) {
  switch (result) {
    case kCudaSuccess:
      return "CUDA_SUCCESS";
    case kCudaOutOfMemory:
      return "CUDA_ERROR_OUT_OF_MEMORY";
    case kCudaInvalidHandle:
      return "CUDA_ERROR_INVALID_HANDLE";
    case kCudaInvalidContext:
      return "CUDA_ERROR_INVALID_CONTEXT";
    case kCudaIllegalAddress:
      return "CUDA_ERROR_ILLEGAL_ADDRESS";
    case kCudaNotPermitted:
      return "CUDA_ERROR_NOT_PERMITTED";
    default:
      return absl::StrCat("CUDA_ERROR_", result);
  }
}

std::string FakeCudaDriver::ErrorString(CudaResult result) { return absl::StrCat("fake error ", result); }

}  // namespace weightbroker::testing
