// GPUs that NVML would report, as a test wants them. Thread-safe.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/mutex.h"
#include "common/device/gpu_inventory.h"

namespace weightbroker::testing {

class FakeGpuInventory : public GpuInventory {
 public:
  explicit FakeGpuInventory(std::vector<GpuInfo> gpus) : gpus_(std::move(gpus)) {}

  void SetFree(const std::string& uuid, int64_t free_bytes) {
    MutexLock lock(mutex_);
    for (GpuInfo& gpu : gpus_) {
      if (gpu.uuid == uuid) gpu.free_bytes = free_bytes;
    }
  }
  void SetProcesses(const std::string& uuid, std::vector<GpuProcess> processes) {
    MutexLock lock(mutex_);
    processes_[uuid] = std::move(processes);
  }
  // What every call gives from now on.
  void Fail(absl::Status status) {
    MutexLock lock(mutex_);
    failure_ = std::move(status);
  }

  // Between the two, whoever asks for the memory of a GPU waits, as for a driver that hangs.
  void Hang() {
    MutexLock lock(mutex_);
    hangs_ = true;
  }
  void GoOn() {
    MutexLock lock(mutex_);
    hangs_ = false;
    changed_.NotifyAll();
  }
  int waiting_count() {
    MutexLock lock(mutex_);
    return waiting_count_;
  }

  absl::StatusOr<std::vector<GpuInfo>> List() override {
    MutexLock lock(mutex_);
    if (!failure_.ok()) return failure_;
    return gpus_;
  }
  absl::StatusOr<GpuMemory> Memory(const std::string& uuid) override {
    MutexLock lock(mutex_);
    ++waiting_count_;
    while (hangs_) changed_.Wait(mutex_);
    --waiting_count_;
    if (!failure_.ok()) return failure_;
    for (const GpuInfo& gpu : gpus_) {
      if (gpu.uuid == uuid) return GpuMemory{gpu.total_bytes, gpu.free_bytes};
    }
    return MakeError(Reason::kDeviceUnknown, absl::StrCat("this machine has no GPU ", uuid));
  }
  absl::StatusOr<std::vector<GpuProcess>> Processes(const std::string& uuid) override {
    MutexLock lock(mutex_);
    if (!failure_.ok()) return failure_;
    return processes_[uuid];
  }
  std::string driver_version() const override { return "999.1"; }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool hangs_ ABSL_GUARDED_BY(mutex_) = false;
  int waiting_count_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<GpuInfo> gpus_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::vector<GpuProcess>> processes_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weightbroker::testing
