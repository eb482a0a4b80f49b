// How the digest kernel divides its work, shared by the kernel, whoever launches it, and the tests' stand-in for a GPU.
//
// Ranges are cut into tiles, which are numbered through; a block of threads takes one tile after another, and each of
// its threads every kDigestThreads-th word of it. Ranges differ in size by a factor of a million, tiles do not.
#pragma once

#include <cstdint>

#include "common/memory/digest_word.h"

namespace weightbroker::wbd1 {

inline constexpr char kDigestKernelName[] = "weightbroker_digest";
inline constexpr unsigned kDigestThreads = 256;
inline constexpr int64_t kDigestTileBytes = 256 << 10;  // a multiple of 8

// A run of memory that has a digest of its own, and the number of its first tile.
struct DigestRange {
  uint64_t address;  // a multiple of 8
  int64_t size_bytes;
  int64_t first_tile;
};

WEIGHTBROKER_HOST_DEVICE constexpr int64_t TilesOf(int64_t size_bytes) {
  return (size_bytes + kDigestTileBytes - 1) / kDigestTileBytes;
}

// The range that has `tile`: the last whose first tile is not beyond it. Ranges of no bytes have no tiles.
WEIGHTBROKER_HOST_DEVICE constexpr int64_t RangeOfTile(const DigestRange* ranges, int64_t range_count, int64_t tile) {
  int64_t low = 0;
  int64_t high = range_count - 1;
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (ranges[middle].first_tile <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The last word of a range whose size is no multiple of 8, filled up with zeros.
WEIGHTBROKER_HOST_DEVICE inline uint64_t TailWordAt(const unsigned char* bytes, int64_t count) {
  uint64_t word = 0;
  for (int64_t i = 0; i < count; ++i) word |= static_cast<uint64_t>(bytes[i]) << (8 * i);
  return word;
}

// Adds to `lanes` what thread `thread` of `threads` has to add for `tile` of `range`.
WEIGHTBROKER_HOST_DEVICE inline void AddTile(const DigestRange& range, int64_t tile, unsigned thread, unsigned threads,
                                             uint64_t* lanes) {
  const int64_t begin_bytes = (tile - range.first_tile) * kDigestTileBytes;
  const int64_t left_bytes = range.size_bytes - begin_bytes;
  const int64_t tile_bytes = left_bytes < kDigestTileBytes ? left_bytes : kDigestTileBytes;
  const auto* const bytes = reinterpret_cast<const unsigned char*>(range.address + static_cast<uint64_t>(begin_bytes));
  const auto* const words = reinterpret_cast<const uint64_t*>(bytes);
  const int64_t word_count = tile_bytes / 8;
  const uint64_t first_word = static_cast<uint64_t>(begin_bytes / 8);
  uint64_t key0 = Key(0, first_word + thread);
  uint64_t key1 = Key(1, first_word + thread);
#if defined(__CUDA_ARCH__)
#pragma unroll 8
#endif
  for (int64_t i = thread; i < word_count; i += threads) {
    AddWordWithKeys(words[i], key0, key1, lanes);
    key0 += threads * kKeyStep0;
    key1 += threads * kKeyStep1;
  }
  if (thread == 0 && tile_bytes % 8 != 0) {
    AddWord(TailWordAt(bytes + word_count * 8, tile_bytes % 8), first_word + static_cast<uint64_t>(word_count), lanes);
  }
}

}  // namespace weightbroker::wbd1
