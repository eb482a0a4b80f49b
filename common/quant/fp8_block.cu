// Quantizes a matrix to block-wise FP8, one block of threads for each block of 128x128: see fp8_block_tile.h.
#include "common/quant/fp8_block_tile.h"

namespace weightbroker {
namespace {

constexpr unsigned kWarpThreads = 32;
constexpr unsigned kWarps = kFp8Threads / kWarpThreads;

// The largest of all threads' `value`, given to each of them.
__device__ uint32_t LargestOfBlock(uint32_t value) {
  __shared__ uint32_t of_warps[kWarps];
  value = __reduce_max_sync(0xFFFFFFFF, value);
  if (threadIdx.x % kWarpThreads == 0) of_warps[threadIdx.x / kWarpThreads] = value;
  __syncthreads();
  uint32_t largest = 0;
#pragma unroll
  for (unsigned warp = 0; warp < kWarps; ++warp) largest = max(largest, of_warps[warp]);
  return largest;
}

template <typename Format>
__device__ void Quantize(const Fp8BlockLaunch& launch) {
  const int64_t block = blockIdx.x;
  Fp8Tile<Format> tile(launch, block, static_cast<int>(threadIdx.x));
  tile.Load();
  const uint32_t amax_bits = LargestOfBlock(tile.AmaxBits());
  if (amax_bits >= kFp8InfinityBits) {
    const uint64_t at = tile.FirstNotFinite();
    if (at != ~uint64_t{0}) {
      atomicMin(reinterpret_cast<unsigned long long*>(launch.not_finite), static_cast<unsigned long long>(at));
    }
    return;
  }
  const float scale = Fp8Scale(amax_bits);
  if (threadIdx.x == 0) {
    const int64_t columns = launch.BlockColumns();
    reinterpret_cast<float*>(launch.scales)[block / columns * launch.scale_row_elements + block % columns] = scale;
  }
  tile.Store(Fp8Inverse(scale));
}

}  // namespace
}  // namespace weightbroker

#define WEIGHTBROKER_FP8_KERNEL(name, format)                             \
  extern "C" __global__ void __launch_bounds__(weightbroker::kFp8Threads) \
      name(const __grid_constant__ weightbroker::Fp8BlockLaunch launch) { \
    weightbroker::Quantize<weightbroker::format>(launch);                 \
  }

WEIGHTBROKER_FP8_KERNEL(weightbroker_fp8_block_bf16, Bf16Format)
WEIGHTBROKER_FP8_KERNEL(weightbroker_fp8_block_f16, F16Format)
WEIGHTBROKER_FP8_KERNEL(weightbroker_fp8_block_f32, F32Format)
