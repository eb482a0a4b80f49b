#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/mutex.h"
#include "common/base/status_macros.h"
#include "common/device/gpu_inventory.h"
#include "common/device/nvml_library.h"

namespace weightbroker {
namespace {

constexpr NvmlResult kNvmlInsufficientSize = 7;
constexpr unsigned kMigEnabled = 1;

struct NvmlMemory {
  unsigned long long total, free, used;
};
struct NvmlProcess {  // nvmlProcessInfo_v2_t, which nvmlDeviceGetComputeRunningProcesses_v3 fills
  unsigned pid;
  unsigned long long used_bytes;
  unsigned gpu_instance, compute_instance;
};
constexpr unsigned long long kNvmlValueNotAvailable = ~0ULL;

// X(member, symbol, parameters). What points to one of the structures above is a void*: their types are not the
// library's.
#define WEIGHTBROKER_NVML_CALLS(X)                                                      \
  X(init, "nvmlInit_v2", ())                                                            \
  X(shutdown, "nvmlShutdown", ())                                                       \
  X(driver_version, "nvmlSystemGetDriverVersion", (char*, unsigned))                    \
  X(device_count, "nvmlDeviceGetCount_v2", (unsigned*))                                 \
  X(handle_by_index, "nvmlDeviceGetHandleByIndex_v2", (unsigned, NvmlDevice*))          \
  X(uuid, "nvmlDeviceGetUUID", (NvmlDevice, char*, unsigned))                           \
  X(name, "nvmlDeviceGetName", (NvmlDevice, char*, unsigned))                           \
  X(compute_capability, "nvmlDeviceGetCudaComputeCapability", (NvmlDevice, int*, int*)) \
  X(memory, "nvmlDeviceGetMemoryInfo", (NvmlDevice, void*))                             \
  X(mig_mode, "nvmlDeviceGetMigMode", (NvmlDevice, unsigned*, unsigned*))               \
  X(processes, "nvmlDeviceGetComputeRunningProcesses_v3", (NvmlDevice, unsigned*, void*))

struct Calls {
#define WEIGHTBROKER_NVML_MEMBER(member, symbol, parameters) NvmlResult(*member) parameters = nullptr;
  WEIGHTBROKER_NVML_CALLS(WEIGHTBROKER_NVML_MEMBER)
#undef WEIGHTBROKER_NVML_MEMBER
  const char* (*error_string)(NvmlResult) = nullptr;
};

absl::Status Unavailable(const std::string& what) {
  return MakeError(Reason::kGpuUnavailable, absl::StrCat("no NVIDIA GPU can be found: ", what));
}

class Nvml : public GpuInventory {
 public:
  explicit Nvml(const Calls& calls) : calls_(calls) {}
  ~Nvml() override {
    if (initialized_) calls_.shutdown();
  }

  absl::Status Start() {
    if (const NvmlResult result = calls_.init(); result != kNvmlSuccess) {
      return Unavailable(absl::StrCat("nvmlInit: ", calls_.error_string(result)));
    }
    initialized_ = true;
    char version[96] = "";
    RETURN_IF_ERROR(Check(calls_.driver_version(version, sizeof(version)), "nvmlSystemGetDriverVersion"));
    driver_version_ = version;
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<GpuInfo>> List() override {
    unsigned count = 0;
    RETURN_IF_ERROR(Check(calls_.device_count(&count), "nvmlDeviceGetCount"));
    std::vector<GpuInfo> gpus;
    for (unsigned index = 0; index < count; ++index) {
      NvmlDevice device = nullptr;
      RETURN_IF_ERROR(Check(calls_.handle_by_index(index, &device), "nvmlDeviceGetHandleByIndex"));
      ASSIGN_OR_RETURN(gpus.emplace_back(), Describe(static_cast<int>(index), device));
      MutexLock lock(mutex_);
      devices_[gpus.back().uuid] = device;
    }
    return gpus;
  }

  absl::StatusOr<GpuMemory> Memory(const std::string& uuid) override {
    ASSIGN_OR_RETURN(NvmlDevice const device, FindDevice(uuid));
    return ReadMemory(device);
  }

  absl::StatusOr<std::vector<GpuProcess>> Processes(const std::string& uuid) override {
    ASSIGN_OR_RETURN(NvmlDevice const device, FindDevice(uuid));
    std::vector<NvmlProcess> found(64);
    auto count = static_cast<unsigned>(found.size());
    NvmlResult result = calls_.processes(device, &count, found.data());
    while (result == kNvmlInsufficientSize) {
      found.resize(2 * std::max<size_t>(found.size(), count));
      count = static_cast<unsigned>(found.size());
      result = calls_.processes(device, &count, found.data());
    }
    RETURN_IF_ERROR(Check(result, "nvmlDeviceGetComputeRunningProcesses"));
    std::vector<GpuProcess> processes;
    for (unsigned i = 0; i < count; ++i) {
      const bool known = found[i].used_bytes != kNvmlValueNotAvailable;
      processes.push_back({static_cast<pid_t>(found[i].pid), known ? static_cast<int64_t>(found[i].used_bytes) : -1});
    }
    return processes;
  }

  std::string driver_version() const override { return driver_version_; }

 private:
  absl::Status Check(NvmlResult result, const char* call) const {
    if (result == kNvmlSuccess) return absl::OkStatus();
    return MakeError(Reason::kCudaError, absl::StrCat(call, ": ", calls_.error_string(result)),
                     {{"call", call}, {"result", absl::StrCat(result)}});
  }

  absl::StatusOr<GpuInfo> Describe(int ordinal, NvmlDevice device) const {
    GpuInfo gpu;
    gpu.ordinal = ordinal;
    char text[128] = "";
    RETURN_IF_ERROR(Check(calls_.uuid(device, text, sizeof(text)), "nvmlDeviceGetUUID"));
    gpu.uuid = text;
    RETURN_IF_ERROR(Check(calls_.name(device, text, sizeof(text)), "nvmlDeviceGetName"));
    gpu.name = text;
    RETURN_IF_ERROR(Check(calls_.compute_capability(device, &gpu.compute_major, &gpu.compute_minor),
                          "nvmlDeviceGetCudaComputeCapability"));
    ASSIGN_OR_RETURN(const GpuMemory memory, ReadMemory(device));
    gpu.total_bytes = memory.total_bytes;
    gpu.free_bytes = memory.free_bytes;
    // GPUs that cannot be partitioned, and drivers in some sandboxes, have no answer.
    unsigned current = 0;
    unsigned pending = 0;
    gpu.mig_enabled = calls_.mig_mode(device, &current, &pending) == kNvmlSuccess && current == kMigEnabled;
    return gpu;
  }

  absl::StatusOr<GpuMemory> ReadMemory(NvmlDevice device) const {
    NvmlMemory memory = {};
    RETURN_IF_ERROR(Check(calls_.memory(device, &memory), "nvmlDeviceGetMemoryInfo"));
    return GpuMemory{static_cast<int64_t>(memory.total), static_cast<int64_t>(memory.free)};
  }

  absl::StatusOr<NvmlDevice> FindDevice(const std::string& uuid) {
    {
      MutexLock lock(mutex_);
      if (const auto found = devices_.find(uuid); found != devices_.end()) return found->second;
    }
    RETURN_IF_ERROR(List().status());
    MutexLock lock(mutex_);
    if (const auto found = devices_.find(uuid); found != devices_.end()) return found->second;
    return MakeError(Reason::kDeviceUnknown, absl::StrCat("this machine has no GPU ", uuid), {{"device", uuid}});
  }

  const Calls calls_;
  bool initialized_ = false;  // as the next, constant once started
  std::string driver_version_;

  Mutex mutex_;
  std::map<std::string, NvmlDevice> devices_ ABSL_GUARDED_BY(mutex_);  // by UUID; handles stay valid until shutdown
};

}  // namespace

absl::StatusOr<std::unique_ptr<GpuInventory>> OpenNvml() {
  NvmlLibrary library;
  Calls calls;
  library.Find("nvmlErrorString", &calls.error_string);
#define WEIGHTBROKER_NVML_FIND(member, symbol, parameters) library.Find(symbol, &calls.member);
  WEIGHTBROKER_NVML_CALLS(WEIGHTBROKER_NVML_FIND)
#undef WEIGHTBROKER_NVML_FIND
  if (!library.fault().empty()) return Unavailable(library.fault());
  auto nvml = std::make_unique<Nvml>(calls);
  RETURN_IF_ERROR(nvml->Start());
  return nvml;
}

std::string DescribeHolders(const std::vector<GpuProcess>& processes, size_t limit) {
  if (processes.empty()) return "no process is listed";
  std::vector<GpuProcess> sorted = processes;
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const GpuProcess& a, const GpuProcess& b) { return a.used_bytes > b.used_bytes; });
  std::string text;
  for (size_t i = 0; i < std::min(limit, sorted.size()); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", "pid ", sorted[i].pid);
    if (sorted[i].used_bytes >= 0) absl::StrAppend(&text, " (", sorted[i].used_bytes >> 20, " MiB)");
  }
  if (sorted.size() > limit) absl::StrAppend(&text, ", and ", sorted.size() - limit, " more");
  return text;
}

}  // namespace weightbroker
