// Lengths in huge pages, and how much of a mapping is in them.
//
//   const int64_t huge = HugeMappedBytes(data, size_bytes);
//
// Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "common/memory/host_memory.h"

namespace weightbroker {

constexpr int64_t RoundUpToHugePages(int64_t size_bytes) {
  return (size_bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
}

// Of the mapping of `size_bytes` (a multiple of the page size) that starts at `data`; what is not mapped does not
// count. By the kernel's scan of its page tables where it has one, else as /proc/self/smaps says.
int64_t HugeMappedBytes(const std::byte* data, int64_t size_bytes);

// The two ways. The first is there since Linux 6.7 (ioctl PAGEMAP_SCAN), and counts reserved huge pages, too; the
// second counts transparent ones of shared memory alone, and has the kernel write down every mapping of the process.
std::optional<int64_t> ScanHugeBytes(const std::byte* data, int64_t size_bytes);
int64_t HugeBytesOfSmaps(const std::byte* data, int64_t size_bytes);

}  // namespace weightbroker
