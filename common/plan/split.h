// Which rows or columns of a tensor a rank gets. Thread-safe: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/architecture_rules.h"
#include "common/plan/expression.h"
#include "common/plan/topology.h"

namespace weightbroker {

inline constexpr int64_t kVocabPadding = 64;  // engines fill a vocabulary up to a multiple of it

// Elements [begin, end) of a dimension.
struct Slice {
  int64_t begin = 0;
  int64_t end = 0;
};

// What a rank gets of one dimension: slices, put behind each other, and zeros up to `length`.
struct SlicedAxis {
  std::vector<Slice> slices;
  int64_t length = 0;
  bool is_cut = false;  // among several ranks
};

// All of a dimension.
SlicedAxis WholeAxis(int64_t length);

// Splits a dimension of `length` as `rule`, which is not kReplicated, says. `tensor` stands in messages.
// ARCHITECTURE_MISMATCH if the length is not what the rule works out; SPLIT_IMPOSSIBLE if it does not divide.
absl::StatusOr<SlicedAxis> SliceAxis(const TensorRule& rule, const Place& place, int64_t length,
                                     const ConfigNumbers& numbers, const std::string& tensor);

// Of `count` experts, the contiguous range of a group. SPLIT_IMPOSSIBLE if they do not divide.
absl::StatusOr<Slice> ExpertsOf(int64_t count, const Place& group);

// SPLIT_IMPOSSIBLE if a rank's part of one of the slices of an FP8 weight, or one of several that are put behind each
// other (`is_part`), would end within a block of 128.
absl::Status CheckBlocksAreWhole(const SlicedAxis& axis, bool is_part, int64_t length, const Place& place,
                                 const std::string& tensor);

// Makes slices that follow each other in the source, and so are behind each other, one.
void MergeNeighbours(SlicedAxis& axis);

// The same split of the dimension of scales that has one for each 128.
SlicedAxis ToBlocks(const SlicedAxis& axis);

}  // namespace weightbroker
