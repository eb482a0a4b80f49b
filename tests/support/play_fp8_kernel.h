// Plays all threads of the GPU's FP8 kernel one after the other: its loads, stores and arithmetic, without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/quant/fp8_block_tile.h"

namespace weightbroker::testing {

template <typename Format>
void PlayFp8Kernel(const Fp8BlockLaunch& launch) {
  for (int64_t block = 0; block < launch.BlockCount(); ++block) {
    uint32_t amax_bits = 0;
    std::vector<Fp8Tile<Format>> tiles;
    for (unsigned thread = 0; thread < kFp8Threads; ++thread) {
      tiles.emplace_back(launch, block, static_cast<int>(thread)).Load();
      amax_bits = std::max(amax_bits, tiles.back().AmaxBits());
    }
    if (amax_bits >= kFp8InfinityBits) {
      auto& first = *reinterpret_cast<uint64_t*>(launch.not_finite);
      for (const auto& tile : tiles) first = std::min(first, tile.FirstNotFinite());
      continue;
    }
    const float scale = Fp8Scale(amax_bits);
    const int64_t columns = launch.BlockColumns();
    reinterpret_cast<float*>(launch.scales)[block / columns * launch.scale_row_elements + block % columns] = scale;
    for (const auto& tile : tiles) tile.Store(Fp8Inverse(scale));
  }
}

}  // namespace weightbroker::testing
