// The ways to weights in GPU memory that gpu_attach_bench compares. Each has somebody who holds the weights, and takes
// samples with fresh processes.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/bench_checkpoint.h"

namespace weightbroker::bench {

struct GpuBenchSetup {
  std::string folder = WEIGHTBROKER_BENCH_DATA "/gpu_attach";  // of the model
  std::string bin_dir = WEIGHTBROKER_BIN_DIR;
  std::string image = WEIGHTBROKER_TOUCH_IMAGE;          // what touch_pages.cu was compiled to
  std::string torch_script = WEIGHTBROKER_TORCH_EXPORT;  // torch_export.py
  std::string python = "python3";
  std::string gpu_uuid;
  BenchCheckpoint checkpoint;
};

class Arm {
 public:
  virtual ~Arm() = default;  // lets the weights go, and waits until their holder has ended

  // The times of one fresh process, as gpu_attach_sample gives them.
  virtual absl::StatusOr<nlohmann::json> Sample() = 0;
};

// "vmm" and "ipc": the service, by the client library; "vmm_torch": the same, to torch's tensors; "tensors": one CUDA
// IPC handle for each tensor, in C++; "torch": the same through torch's own export, in Python. Returns once the weights
// are there.
absl::StatusOr<std::unique_ptr<Arm>> MakeArm(const std::string& name, const GpuBenchSetup& setup);

}  // namespace weightbroker::bench
