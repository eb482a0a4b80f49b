#include "client/src/engine_device.h"

#include <cstdlib>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/device/cuda_context.h"

namespace weightbroker::client {
namespace {

constexpr char kHost[] = "host";

// "cuda:0 is GPU-..., cuda:1 is GPU-..."; what cannot be asked is left out.
std::string DescribeVisibleDevices(CudaDriver& driver, int count) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    const auto uuid = UuidOfCudaDevice(driver, i);
    if (uuid.ok()) absl::StrAppend(&text, text.empty() ? "" : ", ", "cuda:", i, " is ", *uuid);
  }
  return text.empty() ? "none" : text;
}

// How this process can get at the GPU that it does not compute on.
std::string DescribeSight(CudaDriver& driver, const std::string& uuid) {
  if (const auto device = FindCudaDevice(driver, uuid); device.ok()) return absl::StrCat("cuda:", *device, " here");
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return "not visible to this process";
  return absl::StrCat("not visible to this process, whose CUDA_VISIBLE_DEVICES is \"", visible, "\"");
}

}  // namespace

absl::StatusOr<EngineDevice> FindEngineDevice(int cuda_device) {
  if (cuda_device == -1) return EngineDevice();
  ASSIGN_OR_RETURN(CudaDriver* const driver, LoadCudaDriver());
  return FindEngineDevice(*driver, cuda_device);
}

absl::StatusOr<EngineDevice> FindEngineDevice(CudaDriver& driver, int cuda_device) {
  int count = 0;
  if (const CudaResult result = driver.DeviceGetCount(&count); result != kCudaSuccess) {
    return CudaError(driver, result, "cuDeviceGetCount", "counting the GPUs that this process sees");
  }
  if (cuda_device < 0 || cuda_device >= count) {
    const std::string devices = DescribeVisibleDevices(driver, count);
    return MakeError(Reason::kDeviceUnknown,
                     absl::StrCat("the engine says that it computes on cuda:", cuda_device, ", but this process sees ",
                                  count, " GPUs: ", devices),
                     {{"device", absl::StrCat("cuda:", cuda_device)}, {"devices", devices}});
  }
  EngineDevice engine;
  engine.driver = &driver;
  if (const CudaResult result = driver.DeviceGet(cuda_device, &engine.device); result != kCudaSuccess) {
    return CudaError(driver, result, "cuDeviceGet", absl::StrCat("finding cuda:", cuda_device));
  }
  ASSIGN_OR_RETURN(engine.uuid, UuidOfCudaDevice(driver, engine.device));
  return engine;
}

absl::Status CheckLiesOn(const EngineDevice& engine, const std::string& shard_device) {
  const std::string own = engine.name();
  if (shard_device == own) return absl::OkStatus();
  const std::map<std::string, std::string> metadata = {{"device_uuid", shard_device}, {"wanted_uuid", own}};
  if (engine.is_host()) {
    return MakeError(Reason::kDeviceMismatch,
                     absl::StrCat("the weights lie on ", shard_device,
                                  ", and the engine computes on the host; say which GPU the engine computes on "
                                  "(AttachOptions::cuda_device), or register the set in host memory"),
                     metadata);
  }
  const std::string engine_name = absl::StrCat(engine.uuid, " (cuda:", engine.device, " here)");
  const std::string sight = shard_device == kHost ? "host memory" : DescribeSight(*engine.driver, shard_device);
  return MakeError(Reason::kDeviceMismatch,
                   absl::StrCat("the weights lie on ", shard_device, " (", sight, "), and the engine computes on ",
                                engine_name, "; run it on their GPU, or register the set for its own"),
                   metadata);
}

}  // namespace weightbroker::client
