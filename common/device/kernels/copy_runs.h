// Many short runs of bytes, copied by one launch: shared by the kernel, whoever launches it, and the tests' stand-in
// for a GPU. A call of the copy engine for each takes 2.3 us whatever its length: runs of 1 KiB came to an H200 at 0.4
// GB/s that way, and at 48 GB/s by a kernel that reads them from pinned host memory.
#pragma once

#include <cstdint>

#include "common/device/kernels/host_device.h"

namespace weightbroker {

inline constexpr char kCopyRunsKernelName[] = "weightbroker_copy_runs";
inline constexpr unsigned kCopyRunsThreads = 512;
inline constexpr unsigned kCopyRunsLanes = 32;        // threads that share a run
inline constexpr int64_t kLongestCopyRun = 16 << 10;  // longer ones are cut

// `from` is memory that the GPU can read, `to` that it can write. Neither need be aligned.
struct CopyRun {
  uint64_t from = 0;
  uint64_t to = 0;
  int64_t size_bytes = 0;
};

struct alignas(16) CopyWord16 {
  uint64_t low;
  uint64_t high;
};

// Copies every `lanes`-th word of the run, from the `lane`-th on. Gives how many bytes all lanes together have copied.
template <typename Word>
WEIGHTBROKER_HOST_DEVICE inline int64_t CopyWords(const CopyRun& run, unsigned lane, unsigned lanes) {
  const int64_t words = run.size_bytes / static_cast<int64_t>(sizeof(Word));
  const auto* const from = reinterpret_cast<const Word*>(run.from);
  auto* const to = reinterpret_cast<Word*>(run.to);
#if defined(__CUDA_ARCH__)
#pragma unroll 4
#endif
  for (int64_t i = lane; i < words; i += lanes) to[i] = from[i];
  return words * static_cast<int64_t>(sizeof(Word));
}

// What one of the `lanes` threads that share a run does of it: whole words of the largest kind that both ends are
// aligned to, then the bytes that are left.
WEIGHTBROKER_HOST_DEVICE inline void CopyPartOfRun(const CopyRun& run, unsigned lane, unsigned lanes) {
  const uint64_t ends = run.from | run.to;
  int64_t done = 0;
  if (ends % 16 == 0) {
    done = CopyWords<CopyWord16>(run, lane, lanes);
  } else if (ends % 8 == 0) {
    done = CopyWords<uint64_t>(run, lane, lanes);
  } else if (ends % 4 == 0) {
    done = CopyWords<uint32_t>(run, lane, lanes);
  } else if (ends % 2 == 0) {
    done = CopyWords<uint16_t>(run, lane, lanes);
  }
  const auto* const from = reinterpret_cast<const unsigned char*>(run.from);
  auto* const to = reinterpret_cast<unsigned char*>(run.to);
  for (int64_t i = done + lane; i < run.size_bytes; i += lanes) to[i] = from[i];
}

}  // namespace weightbroker
