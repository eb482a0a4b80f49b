// Which GPUs this machine has, how much memory they have left, and who uses it: from NVML, which needs no CUDA context
// and creates none. NVML is opened when it is first needed.
//
//   auto gpus = OpenNvml();
//   if (!gpus.ok()) return gpus.status();                        // GPU_UNAVAILABLE: no driver, or none that answers
//   ASSIGN_OR_RETURN(const std::vector<GpuInfo> list, (*gpus)->List());
//   ASSIGN_OR_RETURN(const auto holders, (*gpus)->Processes(list[0].uuid));
//
// Thread-safe. tests/support/fake_gpu_inventory.h has an implementation that says what a test wants.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace weightbroker {

struct GpuInfo {
  int ordinal = 0;   // NVML's, by PCI address; CUDA may count otherwise
  std::string uuid;  // "GPU-..."; the only identity
  std::string name;
  int compute_major = 0;
  int compute_minor = 0;
  int64_t total_bytes = 0;
  int64_t free_bytes = 0;
  bool mig_enabled = false;  // partitioned: CUDA shows its partitions instead of the GPU
};

struct GpuMemory {
  int64_t total_bytes = 0;
  int64_t free_bytes = 0;
};

// A process with a CUDA context on a GPU.
struct GpuProcess {
  pid_t pid = 0;           // in the namespace of the driver; may mean nothing in ours
  int64_t used_bytes = 0;  // -1 where the driver does not say
};

class GpuInventory {
 public:
  virtual ~GpuInventory() = default;

  // All of them, by ordinal. CUDA_ERROR if NVML fails.
  virtual absl::StatusOr<std::vector<GpuInfo>> List() = 0;
  // Memory of one GPU now. DEVICE_UNKNOWN if there is none with this UUID.
  virtual absl::StatusOr<GpuMemory> Memory(const std::string& uuid) = 0;
  // Its processes with a context. Memory that outlives its maker's context is nobody's here.
  virtual absl::StatusOr<std::vector<GpuProcess>> Processes(const std::string& uuid) = 0;
  // "580.159.03".
  virtual std::string driver_version() const = 0;
};

// GPU_UNAVAILABLE if there is no libnvidia-ml.so.1 or it cannot be initialized, saying what it said.
absl::StatusOr<std::unique_ptr<GpuInventory>> OpenNvml();

// Who uses the memory of a GPU, for a message: "pid 4711 (71,680 MiB), pid 4712 (1,024 MiB), and 3 more"; or that no
// process is listed. At most `limit` are named, largest first.
std::string DescribeHolders(const std::vector<GpuProcess>& processes, size_t limit = 4);

}  // namespace weightbroker
