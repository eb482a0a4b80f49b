// A box of a source tensor, cut along one dimension, and the pieces that bring it to its place. Thread-safe: pure
// functions.
#pragma once

#include <cstdint>
#include <vector>

#include "common/plan/plan.h"
#include "common/plan/split.h"

namespace weightbroker {

struct Region {
  int32_t source = 0;          // into Checkpoint::tensors
  std::vector<int64_t> shape;  // of the source; of scales, their grid, however it is stored
  int axis = 0;                // what is cut; 0 for a scalar
  SlicedAxis cut;
  Slice stack;  // of the first dimension, if that is a stack of experts and not what is cut
  bool is_stack = false;

  // What it becomes.
  std::vector<int64_t> ResultShape() const;
};

int64_t ElementCount(const std::vector<int64_t>& shape);

// Copies (or converts) the region to its own shape, in row-major order, from element `offset` of the destination on.
void AppendCopy(const Region& region, int64_t offset, std::vector<Piece>& pieces);

// The same with the last two of its three dimensions exchanged.
void AppendTransposed(const Region& region, int64_t offset, std::vector<Piece>& pieces);

// Quantizes the region, which is a matrix, to element `offset`, and its scales to element `scale_offset` of theirs.
void AppendQuantized(const Region& region, int64_t offset, int64_t scale_offset, std::vector<Piece>& pieces);

}  // namespace weightbroker
