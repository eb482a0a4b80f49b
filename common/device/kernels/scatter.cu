// Moves runs of elements to where they land apart from each other: see scatter_runs.h.
#include "common/device/kernels/scatter_runs.h"

extern "C" __global__ void __launch_bounds__(weightbroker::kScatterThreads)
    weightbroker_scatter(weightbroker::ScatterRuns runs) {
  const int64_t count = runs.run_count * runs.run_elements;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    weightbroker::ScatterElement(runs, i);
  }
}
