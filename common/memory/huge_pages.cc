#include "common/memory/huge_pages.h"

#include <fcntl.h>
#include <sys/ioctl.h>

#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <string>

#include "common/base/unique_fd.h"

namespace weightbroker {
namespace {

// From Linux's include/uapi/linux/fs.h, which is older where this is built.
struct PageRegion {
  uint64_t start = 0;
  uint64_t end = 0;
  uint64_t categories = 0;
};
struct PageScan {
  uint64_t size = sizeof(PageScan);
  uint64_t flags = 0;
  uint64_t start = 0;
  uint64_t end = 0;
  uint64_t walk_end = 0;
  uint64_t regions = 0;
  uint64_t region_count = 0;
  uint64_t max_pages = 0;
  uint64_t category_inverted = 0;
  uint64_t category_mask = 0;
  uint64_t category_anyof_mask = 0;
  uint64_t return_mask = 0;
};
constexpr unsigned long kPageScan = _IOWR('f', 16, PageScan);
constexpr uint64_t kPageIsHuge = 1 << 6;

}  // namespace

std::optional<int64_t> ScanHugeBytes(const std::byte* data, int64_t size_bytes) {
  const UniqueFd pagemap(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  if (!pagemap.valid()) return std::nullopt;
  PageRegion regions[64];
  PageScan scan;
  scan.start = reinterpret_cast<uintptr_t>(data);
  scan.end = scan.start + static_cast<uint64_t>(size_bytes);
  scan.regions = reinterpret_cast<uintptr_t>(regions);
  scan.region_count = std::size(regions);
  scan.category_mask = kPageIsHuge;
  scan.return_mask = kPageIsHuge;
  int64_t huge_bytes = 0;
  while (scan.start < scan.end) {
    const int found = ioctl(pagemap.get(), kPageScan, &scan);
    if (found < 0) return std::nullopt;
    for (int i = 0; i < found; ++i) huge_bytes += static_cast<int64_t>(regions[i].end - regions[i].start);
    if (scan.walk_end <= scan.start) return std::nullopt;
    scan.start = scan.walk_end;
  }
  return huge_bytes;
}

int64_t HugeBytesOfSmaps(const std::byte* data, int64_t size_bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const auto end = begin + static_cast<uint64_t>(RoundUpToHugePages(size_bytes));
  std::ifstream smaps("/proc/self/smaps");
  bool inside = false;
  int64_t huge_kib = 0;
  for (std::string line; std::getline(smaps, line);) {
    uint64_t from = 0;
    uint64_t to = 0;
    int64_t kib = 0;
    if (std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " ", &from, &to) == 2) {
      inside = from >= begin && to <= end;
    } else if (inside && std::sscanf(line.c_str(), "ShmemPmdMapped: %" SCNd64 " kB", &kib) == 1) {
      huge_kib += kib;
    }
  }
  return huge_kib * 1024;
}

int64_t HugeMappedBytes(const std::byte* data, int64_t size_bytes) {
  const auto scanned = ScanHugeBytes(data, size_bytes);
  return scanned.has_value() ? *scanned : HugeBytesOfSmaps(data, size_bytes);
}

}  // namespace weightbroker
