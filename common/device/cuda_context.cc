#include "common/device/cuda_context.h"

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker {

absl::StatusOr<std::string> UuidOfCudaDevice(CudaDriver& driver, CudaDevice device) {
  CudaUuid uuid = {};
  if (const CudaResult result = driver.DeviceGetUuid(device, &uuid); result != kCudaSuccess) {
    return CudaError(driver, result, "cuDeviceGetUuid", absl::StrCat("asking for the UUID of device ", device));
  }
  return FormatGpuUuid(uuid);
}

absl::StatusOr<CudaDevice> FindCudaDevice(CudaDriver& driver, const std::string& uuid) {
  if (uuid.compare(0, 4, "MIG-") == 0) {
    return MakeError(Reason::kDeviceUnsupported,
                     absl::StrCat(uuid,
                                  " is a partition of a GPU (MIG), whose memory the driver hands to no other "
                                  "process: take a whole GPU"),
                     {{"device_uuid", uuid}});
  }
  int count = 0;
  if (const CudaResult result = driver.DeviceGetCount(&count); result != kCudaSuccess) {
    return CudaError(driver, result, "cuDeviceGetCount", "counting the GPUs");
  }
  std::string seen;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CudaDevice device = 0;
    if (const CudaResult result = driver.DeviceGet(ordinal, &device); result != kCudaSuccess) {
      return CudaError(driver, result, "cuDeviceGet", absl::StrCat("finding GPU ", ordinal));
    }
    ASSIGN_OR_RETURN(const std::string found, UuidOfCudaDevice(driver, device));
    if (found == uuid) return device;
    absl::StrAppend(&seen, seen.empty() ? "" : ", ", found);
  }
  if (seen.empty()) seen = "none";
  return MakeError(Reason::kDeviceUnknown,
                   absl::StrCat("this process does not see the GPU ", uuid, " (CUDA_VISIBLE_DEVICES?); it sees ", seen),
                   {{"device", uuid}, {"devices", seen}});
}

absl::StatusOr<CudaContext> CudaContext::Retain(CudaDriver& driver, CudaDevice device) {
  CudaContextHandle handle = nullptr;
  if (const CudaResult result = driver.DevicePrimaryCtxRetain(device, &handle); result != kCudaSuccess) {
    ASSIGN_OR_RETURN(const std::string uuid, UuidOfCudaDevice(driver, device));
    return CudaError(driver, result, "cuDevicePrimaryCtxRetain", absl::StrCat("making a context on the GPU ", uuid));
  }
  return CudaContext(std::make_shared<const State>(driver, device, handle));
}

// A process that exits may find the driver gone already; there is nothing to give back then.
CudaContext::State::~State() { (void)driver.DevicePrimaryCtxRelease(device); }

CudaScope::CudaScope(const CudaContext& context) : context_(context) {
  const CudaResult result = context_.driver().CtxPushCurrent(context_.handle());
  if (result == kCudaSuccess) return;
  status_ = CudaError(context_.driver(), result, "cuCtxPushCurrent",
                      absl::StrCat("entering the context of device ", context_.device()));
}

CudaScope::~CudaScope() {
  if (!status_.ok()) return;
  CudaContextHandle popped = nullptr;
  (void)context_.driver().CtxPopCurrent(&popped);
}

}  // namespace weightbroker
