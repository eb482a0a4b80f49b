// Copies runs of bytes, a warp each: see copy_runs.h.
#include "common/device/kernels/copy_runs.h"

extern "C" __global__ void __launch_bounds__(weightbroker::kCopyRunsThreads)
    weightbroker_copy_runs(const weightbroker::CopyRun* runs, int64_t count) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * blockDim.x / weightbroker::kCopyRunsLanes;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / weightbroker::kCopyRunsLanes;
  for (int64_t i = first; i < count; i += warps) {
    weightbroker::CopyPartOfRun(runs[i], threadIdx.x % weightbroker::kCopyRunsLanes, weightbroker::kCopyRunsLanes);
  }
}
