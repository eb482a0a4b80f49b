// The devices that this service may put weights on, and what it knows of every GPU here.
//
//   DeviceCatalog devices({.wanted = config.devices});                 // asks NVML, in a thread of its own
//   RETURN_IF_ERROR(devices.Check());                                  // what was named is there
//   PlaceRanks(request, world_size, devices.Served());                 // GPUs first, the host last
//   ComputeFingerprint(spec, environment, identity, devices.FactsOf(placement.ranks));
//
// It creates no CUDA context: a broker with one would take GPU memory, and could be poisoned. NVML takes its time to
// start, and what is resident already does not need it, so a broker does not wait for it before it serves; the calls
// that do need it wait. Thread-safe.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/mutex.h"
#include "common/device/gpu_inventory.h"
#include "common/identity/fingerprint.h"
#include "server/broker/placement.h"
#include "server/broker/registry.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker {

// Words that --devices takes besides a GPU's ordinal or UUID.
inline constexpr char kAllDevices[] = "all";  // every GPU that can be used; none is no error

struct DeviceCatalogOptions {
  // GPUs by ordinal or UUID, kAllDevices, or kHostDevice alone for none. The host is always served, as the last.
  std::vector<std::string> wanted = {kAllDevices};
  std::function<absl::StatusOr<std::unique_ptr<GpuInventory>>()> open = OpenNvml;
  bool build_has_kernels = true;  // a build without CUDA's compiler has none
};

// What Health says.
struct GpuReport {
  std::vector<v1::Device> devices;
  std::string driver_version;
  std::string refusal;  // why no GPU is served; empty if one is
};

class DeviceCatalog {
 public:
  explicit DeviceCatalog(DeviceCatalogOptions options);
  ~DeviceCatalog();
  DeviceCatalog(const DeviceCatalog&) = delete;
  DeviceCatalog& operator=(const DeviceCatalog&) = delete;

  // One with nothing but the host, which knows no GPU. Never deleted.
  static DeviceCatalog& HostOnlyCatalog();

  // Ok if every GPU that was named is there and can be used: else GPU_UNAVAILABLE, DEVICE_UNKNOWN listing those that
  // are there, or DEVICE_UNSUPPORTED. Always ok if none was named.
  absl::Status Check();

  // Never empty: the GPUs in the order in which they were named or are numbered, then the host.
  std::vector<ServedDevice> Served();

  // Has a GPU, or every one if `uuid` is empty, take no more weights until the broker is started anew. The first fault
  // counts. Does not wait.
  void MarkFaulty(const std::string& uuid, const std::string& why);

  // What of the devices that hold `ranks` is part of a fingerprint.
  DeviceFacts FactsOf(std::span<const RankPlacement> ranks);

  // What a GPU would still allow, and who uses it. DEVICE_UNKNOWN if it is not served.
  absl::StatusOr<DeviceMemory> Memory(const std::string& device);

  // Why no GPU is served; empty if one is.
  const std::string& refusal() { return Wait().refusal; }

  // With the memory that is free now.
  GpuReport Report();

 private:
  struct Found {
    std::unique_ptr<GpuInventory> inventory;  // null without a driver
    std::vector<GpuInfo> gpus;
    std::vector<std::string> refusals;  // of each of `gpus`; empty if it is served
    std::vector<ServedDevice> served;
    std::string refusal;
    absl::Status check;
  };

  Found Discover() const;
  absl::Status FindGpus(Found* found) const;
  void ChooseGpus(Found* found) const;
  const Found& Wait();
  std::string FaultOf(const std::string& uuid);
  static DeviceFacts FactsOfGpu(const Found& found, const std::string& uuid);

  const DeviceCatalogOptions options_;

  Mutex mutex_;
  CondVar discovered_;
  std::unique_ptr<const Found> found_ ABSL_GUARDED_BY(mutex_);         // constant once it is there
  std::map<std::string, std::string> faults_ ABSL_GUARDED_BY(mutex_);  // by UUID; "" for all GPUs
  std::thread thread_;
};

}  // namespace weightbroker
