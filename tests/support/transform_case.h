// One plan with a tensor for each thing that a load does to bytes on their way, and the transfers that fill them from
// one chunk: for comparing what different destinations make of the same.
#pragma once

#include <cstddef>
#include <vector>

#include "common/load/destination.h"
#include "common/plan/plan.h"

namespace weightbroker::testing {

struct TransformCase {
  static constexpr int64_t kRows = 200;
  static constexpr int64_t kColumns = 300;

  // Slices of rows, conversion, transposition of elements of 1, 2, 4 and 8 bytes, quantization with its scales, bytes
  // at an odd offset, an alias, a tensor of nothing, and memory that nothing lands in.
  static TransformCase Make();

  ShardPlan plan;  // of one slab
  std::vector<Transfer> transfers;
  std::vector<std::byte> chunk;  // kRows x kColumns of F32, random
  size_t quantized = 0;          // the transfer that quantizes
};

}  // namespace weightbroker::testing
