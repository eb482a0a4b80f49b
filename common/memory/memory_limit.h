// The most that weights may take of a memory, in bytes or as a part of all of it.
//
//   const MemoryLimit limit{.percent = 80};
//   const int64_t limit_bytes = limit.Of(total_bytes);   // 0: there is no limit
//
// A plain value.
#pragma once

#include <cstdint>

namespace weightbroker {

struct MemoryLimit {
  int64_t bytes = 0;
  int percent = 0;  // of all that there is, 1 to 100; if not 0, in place of `bytes`

  // In bytes; 0 for no limit. One byte where a part of a memory of unknown size is asked for: nothing is granted on a
  // guess.
  int64_t Of(int64_t total_bytes) const {
    if (percent == 0) return bytes;
    const int64_t part = total_bytes / 100 * percent + total_bytes % 100 * percent / 100;
    return part > 0 ? part : 1;
  }

  bool operator==(const MemoryLimit&) const = default;
};

}  // namespace weightbroker
