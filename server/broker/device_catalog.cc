#include "server/broker/device_catalog.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

constexpr char kMigRefusal[] = "it is partitioned (MIG), and the driver hands a partition's memory to no other process";

std::string ComputeCapability(const GpuInfo& gpu) { return absl::StrCat(gpu.compute_major, ".", gpu.compute_minor); }

// The UUIDs of `gpus`, each with its ordinal beside it.
std::string ListGpus(const std::vector<GpuInfo>& gpus) {
  if (gpus.empty()) return "none";
  return absl::StrJoin(
      gpus, ", ", [](std::string* out, const GpuInfo& gpu) { absl::StrAppend(out, gpu.uuid, " (", gpu.ordinal, ")"); });
}

bool IsNamed(const GpuInfo& gpu, const std::string& word) {
  return word == gpu.uuid || word == absl::StrCat(gpu.ordinal);
}

// Each value once, in order; "8.0,9.0" for GPUs that differ.
std::string Distinct(std::vector<std::string> values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return absl::StrJoin(values, ",");
}

}  // namespace

DeviceCatalog::DeviceCatalog(DeviceCatalogOptions options) : options_(std::move(options)) {
  thread_ = std::thread([this] {
    auto found = std::make_unique<const Found>(Discover());
    MutexLock lock(mutex_);
    found_ = std::move(found);
    discovered_.NotifyAll();
  });
}

DeviceCatalog::~DeviceCatalog() { thread_.join(); }

DeviceCatalog& DeviceCatalog::HostOnlyCatalog() {
  static DeviceCatalog* const catalog = new DeviceCatalog({.wanted = {kHostDevice}});
  return *catalog;
}

DeviceCatalog::Found DeviceCatalog::Discover() const {
  Found found;
  const absl::Status gpus = FindGpus(&found);
  if (gpus.ok()) {
    ChooseGpus(&found);
  } else {
    found.refusal = std::string(gpus.message());
  }
  const bool names_gpus = options_.wanted != std::vector<std::string>{kAllDevices} &&
                          options_.wanted != std::vector<std::string>{kHostDevice};
  if (names_gpus && !gpus.ok()) found.check = gpus;
  for (const ServedDevice& device : found.served) Log(LogLevel::kInfo, "gpu.served", {{"device", device.name}});
  if (found.served.empty() && options_.wanted != std::vector<std::string>{kHostDevice}) {
    Log(LogLevel::kInfo, "gpu.none", {{"message", found.refusal}, {"handle_kind", "HOST_MEMFD"}});
  }
  for (ServedDevice& host : HostOnly()) found.served.push_back(std::move(host));
  return found;
}

absl::Status DeviceCatalog::FindGpus(Found* found) const {
  if (options_.wanted == std::vector<std::string>{kHostDevice}) {
    return MakeError(Reason::kGpuUnavailable, "the service was started with --devices=host");
  }
  ASSIGN_OR_RETURN(found->inventory, options_.open());
  ASSIGN_OR_RETURN(found->gpus, found->inventory->List());
  found->refusals.assign(found->gpus.size(), "");
  if (found->gpus.empty()) {
    return MakeError(Reason::kGpuUnavailable, "there is an NVIDIA driver here, but it has no GPU");
  }
  if (!options_.build_has_kernels) {
    const std::string why = "this build has no GPU kernels: it was made without CUDA's compiler";
    found->refusals.assign(found->gpus.size(), why);
    return MakeError(Reason::kGpuUnavailable, why);
  }
  return absl::OkStatus();
}

// Serves what is wanted, in that order, and says of every other GPU why not.
void DeviceCatalog::ChooseGpus(Found* found) const {
  for (std::string& refusal : found->refusals) refusal = "--devices does not name it";
  for (const std::string& word : options_.wanted) {
    bool matched = word == kAllDevices || word == kHostDevice;
    for (size_t i = 0; i < found->gpus.size(); ++i) {
      const GpuInfo& gpu = found->gpus[i];
      const bool named = IsNamed(gpu, word);
      if (!named && word != kAllDevices) continue;
      matched = true;
      if (found->refusals[i].empty()) continue;  // named twice
      found->refusals[i] = gpu.mig_enabled ? kMigRefusal : "";
      if (!gpu.mig_enabled) {
        found->served.push_back({gpu.uuid, {v1::HANDLE_KIND_CUDA_VMM_FD, v1::HANDLE_KIND_CUDA_IPC}});
      } else if (named) {
        found->check.Update(MakeError(Reason::kDeviceUnsupported,
                                      absl::StrCat("--devices names the GPU ", gpu.uuid, ", but ", kMigRefusal),
                                      {{"device_uuid", gpu.uuid}}));
      }
    }
    if (matched) continue;
    const std::string known = ListGpus(found->gpus);
    found->check.Update(MakeError(Reason::kDeviceUnknown,
                                  absl::StrCat("--devices names the GPU ", word, ", and those here are ", known),
                                  {{"device", word}, {"devices", known}}));
  }
  if (!found->served.empty()) return;
  found->refusal =
      absl::StrCat("of the GPUs here, ", ListGpus(found->gpus), ", none can be used: ", found->refusals.front());
}

const DeviceCatalog::Found& DeviceCatalog::Wait() {
  MutexLock lock(mutex_);
  while (found_ == nullptr) discovered_.Wait(mutex_);
  return *found_;
}

absl::Status DeviceCatalog::Check() { return Wait().check; }

const std::vector<ServedDevice>& DeviceCatalog::Served() { return Wait().served; }

DeviceFacts DeviceCatalog::FactsOfGpu(const Found& found, const std::string& uuid) {
  const auto gpu = std::find_if(found.gpus.begin(), found.gpus.end(), [&](const auto& g) { return g.uuid == uuid; });
  if (gpu == found.gpus.end()) return HostDeviceFacts();
  return GpuDeviceFacts(ComputeCapability(*gpu), found.inventory->driver_version());
}

DeviceFacts DeviceCatalog::FactsOf(std::span<const RankPlacement> ranks) {
  const bool on_host = std::all_of(ranks.begin(), ranks.end(), [](const auto& r) { return r.device == kHostDevice; });
  if (on_host) return HostDeviceFacts();  // without waiting
  const Found& found = Wait();
  std::map<std::string, std::vector<std::string>> values;
  for (const RankPlacement& rank : ranks) {
    for (auto& [field, value] : FactsOfGpu(found, rank.device)) values[field].push_back(std::move(value));
  }
  DeviceFacts facts;
  for (auto& [field, found_values] : values) facts[field] = Distinct(std::move(found_values));
  return facts;
}

absl::StatusOr<DeviceMemory> DeviceCatalog::Memory(const std::string& device) {
  const Found& found = Wait();
  const bool is_served = std::any_of(found.served.begin(), found.served.end(),
                                     [&](const ServedDevice& served) { return served.name == device; });
  if (!is_served || found.inventory == nullptr) return NoDeviceMemory(device);
  ASSIGN_OR_RETURN(const GpuMemory memory, found.inventory->Memory(device));
  // Who uses it is for people; where NVML does not say, there is still an answer.
  const auto processes = found.inventory->Processes(device);
  return DeviceMemory{.available_bytes = memory.free_bytes,
                      .limited_by = "device",
                      .holders = processes.ok() ? DescribeHolders(*processes) : "",
                      .total_bytes = memory.total_bytes};
}

GpuReport DeviceCatalog::Report() {
  const Found& found = Wait();
  GpuReport report;
  report.refusal = found.refusal;
  if (found.inventory != nullptr) report.driver_version = found.inventory->driver_version();
  for (size_t i = 0; i < found.gpus.size(); ++i) {
    const GpuInfo& gpu = found.gpus[i];
    v1::Device& device = report.devices.emplace_back();
    device.set_uuid(gpu.uuid);
    device.set_ordinal(gpu.ordinal);
    device.set_name(gpu.name);
    device.set_compute_capability(ComputeCapability(gpu));
    device.set_total_bytes(gpu.total_bytes);
    device.set_mig_enabled(gpu.mig_enabled);
    device.set_refusal(found.refusals[i]);
    if (const auto memory = found.inventory->Memory(gpu.uuid); memory.ok()) device.set_free_bytes(memory->free_bytes);
  }
  return report;
}

}  // namespace weightbroker
