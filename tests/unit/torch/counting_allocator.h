// Counts what torch allocates in host memory while the object lives.
//
//   const CountAllocations counted;
//   ...
//   EXPECT_EQ(counted.bytes(), 0);
//
// One at a time. The first replaces torch's allocator for the rest of the process.
#pragma once

#include <cstdint>

namespace weightbroker::testing {

class CountAllocations {
 public:
  CountAllocations();
  ~CountAllocations();
  CountAllocations(const CountAllocations&) = delete;
  CountAllocations& operator=(const CountAllocations&) = delete;

  int64_t bytes() const;
};

}  // namespace weightbroker::testing
