// The two lanes of the wbd1 digest of each range: see digest_tiles.h for how the work is divided.
#include "common/device/kernels/digest_tiles.h"

namespace {

using weightbroker::wbd1::DigestRange;

constexpr unsigned kWarp = 32;
constexpr unsigned kWarps = weightbroker::wbd1::kDigestThreads / kWarp;

__device__ uint64_t SumOfWarp(uint64_t value) {
  for (unsigned distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_down_sync(0xFFFFFFFF, static_cast<unsigned long long>(value), distance);
  }
  return value;
}

}  // namespace

// Adds to lanes[2 * i] and lanes[2 * i + 1], which are zero before, what range i comes to.
extern "C" __global__ void __launch_bounds__(weightbroker::wbd1::kDigestThreads)
    weightbroker_digest(const DigestRange* ranges, int64_t range_count, int64_t tile_count, unsigned long long* lanes) {
  __shared__ uint64_t sums[2][kWarps];
  for (int64_t tile = blockIdx.x; tile < tile_count; tile += gridDim.x) {
    const int64_t index = weightbroker::wbd1::RangeOfTile(ranges, range_count, tile);
    uint64_t mine[2] = {0, 0};
    weightbroker::wbd1::AddTile(ranges[index], tile, threadIdx.x, blockDim.x, mine);
    for (int lane = 0; lane < 2; ++lane) {
      const uint64_t sum = SumOfWarp(mine[lane]);
      if (threadIdx.x % kWarp == 0) sums[lane][threadIdx.x / kWarp] = sum;
    }
    __syncthreads();
    if (threadIdx.x < 2) {
      unsigned long long total = 0;
      for (unsigned warp = 0; warp < kWarps; ++warp) total += sums[threadIdx.x][warp];
      atomicAdd(&lanes[2 * index + threadIdx.x], total);
    }
    __syncthreads();
  }
}
