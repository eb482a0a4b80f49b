// How much host memory there is for a new slab, and what pages it would get.
//
//   const HostMemory memory = ReadHostMemory();
//   if (need > memory.available_bytes) ...                    // memory.limited_by says whose limit it is
//
// Thread-safe: all functions only read what the kernel says.
#pragma once

#include <cstdint>
#include <string>

#include "weightbroker/v1/types.pb.h"

namespace weightbroker {

inline constexpr int64_t kHugePageBytes = 2 << 20;

struct HostMemory {
  int64_t available_bytes = 0;  // the least of MemAvailable and what each cgroup above this process still allows
  const char* limited_by = "";  // "machine" or "cgroup"
  // In huge pages that were set apart and nobody has or has been promised: no part of available_bytes, and not charged
  // to a cgroup's memory. A slab takes them if all of it fits.
  int64_t free_huge_page_bytes = 0;
};

// How much memory a new slab could take. Reads /proc/meminfo and the memory controllers of cgroup v1 and v2; page cache
// that a cgroup could drop counts as available in it. `root` stands before every path that is read, for tests.
HostMemory ReadHostMemory(const std::string& root = "");

// All the memory that there is for this process: the machine's, or the least that a cgroup above it limits it to. It
// does not change with what is taken.
int64_t ReadHostMemoryTotal(const std::string& root = "");

// What pages a new slab of `size_bytes` would get now: reserved huge pages if enough are free, else transparent ones
// where the system allows them for shared memory, else base pages. Less than one huge page gets base pages.
v1::PageKind ProbeHostPageKind(int64_t size_bytes, const std::string& root = "");

// Whether write() to shared memory takes transparent huge pages, too, which are then not cleared first where all of
// them is written (Linux 6.18). Where only an advised mapping gets them, it does not.
bool WritesTakeHugePages(const std::string& root = "");

}  // namespace weightbroker
