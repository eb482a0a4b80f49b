#include "common/plan/split.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/quant/gate.h"

namespace weightbroker {
namespace {

constexpr int64_t kBlock = kFp8BlockSize[0];

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A part of a dimension: `count` units of `size`.
struct Units {
  int64_t begin = 0;
  int64_t count = 0;
  int64_t size = 0;
  bool replicate = false;
  std::string count_name;
};

absl::StatusOr<std::vector<Units>> PartsOf(const TensorRule& rule, int64_t length, const ConfigNumbers& numbers,
                                           const std::string& tensor) {
  std::vector<Units> parts;
  int64_t end = 0;
  for (const SplitPart& part : rule.parts) {
    Units units{.begin = end, .count = length, .size = 1, .replicate = part.replicate, .count_name = part.count};
    if (!part.count.empty()) {
      ASSIGN_OR_RETURN(units.count, numbers.Evaluate(part.count));
      ASSIGN_OR_RETURN(units.size, numbers.Evaluate(part.size));
    }
    end += units.count * units.size;
    parts.push_back(std::move(units));
  }
  if (end == length) return parts;
  return MakeError(Reason::kArchitectureMismatch,
                   absl::StrCat("tensor ", Quote(tensor), ": the dimension that is split has ", length,
                                " elements; by the config it is to have ", end,
                                ": the file may be stored in another order than its architecture says"),
                   {{"tensor", Printable(tensor)}, {"found", absl::StrCat(length)}, {"expected", absl::StrCat(end)}});
}

absl::Status DoesNotDivide(const Units& units, const Place& place, const std::string& tensor) {
  const std::string unit = units.count_name.empty() ? "elements" : units.count_name;
  std::string text = absl::StrCat("tensor ", Quote(tensor), ": ", units.count, " ", unit, " do not divide among ",
                                  place.size, " ranks");
  if (units.size > 1) {
    absl::StrAppend(&text, ": ", units.count * units.size, " / ", place.size, " is not a whole number of ", unit,
                    " of ", units.size);
  }
  return MakeError(Reason::kSplitImpossible, text,
                   {{"tensor", Printable(tensor)},
                    {"unit", unit},
                    {"count", absl::StrCat(units.count)},
                    {"unit_size", absl::StrCat(units.size)},
                    {"ranks", absl::StrCat(place.size)}});
}

absl::StatusOr<Slice> SliceUnits(const Units& units, const Place& place, const std::string& tensor) {
  if (units.count % place.size == 0) {
    const int64_t each = units.count / place.size * units.size;
    return Slice{units.begin + place.index * each, units.begin + (place.index + 1) * each};
  }
  if (!units.replicate || place.size % units.count != 0) return DoesNotDivide(units, place, tensor);
  const int64_t unit = place.index / (place.size / units.count);
  return Slice{units.begin + unit * units.size, units.begin + (unit + 1) * units.size};
}

absl::StatusOr<SlicedAxis> SliceVocabulary(const Place& place, int64_t length, const std::string& tensor) {
  const int64_t padded = CeilDiv(length, kVocabPadding) * kVocabPadding;
  if (padded % place.size != 0) {
    return DoesNotDivide({.count = padded, .size = 1, .count_name = "padded rows of the vocabulary"}, place, tensor);
  }
  const int64_t each = padded / place.size;
  const auto bound = [&](int64_t index) { return std::min(index * each, length); };
  return SlicedAxis{.slices = {{bound(place.index), bound(place.index + 1)}}, .length = each, .is_cut = place.size > 1};
}

}  // namespace

SlicedAxis WholeAxis(int64_t length) { return {.slices = {{0, length}}, .length = length}; }

absl::StatusOr<SlicedAxis> SliceAxis(const TensorRule& rule, const Place& place, int64_t length,
                                     const ConfigNumbers& numbers, const std::string& tensor) {
  if (rule.split == Split::kVocab) return SliceVocabulary(place, length, tensor);
  ASSIGN_OR_RETURN(const auto parts, PartsOf(rule, length, numbers, tensor));
  SlicedAxis axis;
  axis.is_cut = place.size > 1;
  for (const Units& units : parts) {
    ASSIGN_OR_RETURN(const Slice slice, SliceUnits(units, place, tensor));
    axis.length += slice.end - slice.begin;
    axis.slices.push_back(slice);
  }
  return axis;
}

absl::StatusOr<Slice> ExpertsOf(int64_t count, const Place& group) {
  if (count % group.size == 0) {
    const int64_t each = count / group.size;
    return Slice{group.index * each, (group.index + 1) * each};
  }
  return MakeError(Reason::kSplitImpossible,
                   absl::StrCat(count, " experts do not divide among expert_parallel_size ", group.size),
                   {{"unit", "experts"}, {"count", absl::StrCat(count)}, {"ranks", absl::StrCat(group.size)}});
}

absl::Status CheckBlocksAreWhole(const SlicedAxis& axis, bool is_part, int64_t length, const Place& place,
                                 const std::string& tensor) {
  if (!axis.is_cut && !is_part) return absl::OkStatus();
  for (const Slice& slice : axis.slices) {
    const int64_t size = slice.end - slice.begin;
    const bool starts_a_block = slice.begin % kBlock == 0;
    if (starts_a_block && size % kBlock == 0) continue;
    const std::string what = axis.is_cut ? absl::StrCat(length, " among ", place.size, " ranks gives parts of ", size)
                                         : absl::StrCat("a part of ", size);
    return MakeError(Reason::kSplitImpossible,
                     absl::StrCat("tensor ", Quote(tensor), ": ", what, ", which is cut inside a block of ", kBlock,
                                  " that has one FP8 scale: ", size, " / ", kBlock, " = ", size / kBlock,
                                  " and a rest of ", size % kBlock),
                     {{"tensor", Printable(tensor)},
                      {"length", absl::StrCat(length)},
                      {"ranks", absl::StrCat(place.size)},
                      {"part", absl::StrCat(size)},
                      {"block", absl::StrCat(kBlock)}});
  }
  return absl::OkStatus();
}

void MergeNeighbours(SlicedAxis& axis) {
  std::vector<Slice> merged;
  for (const Slice& slice : axis.slices) {
    if (!merged.empty() && merged.back().end == slice.begin) {
      merged.back().end = slice.end;
    } else {
      merged.push_back(slice);
    }
  }
  axis.slices = std::move(merged);
}

SlicedAxis ToBlocks(const SlicedAxis& axis) {
  SlicedAxis blocks;
  blocks.is_cut = axis.is_cut;
  blocks.length = CeilDiv(axis.length, kBlock);
  for (const Slice& slice : axis.slices) {
    blocks.slices.push_back(
        {slice.begin / kBlock, slice.begin == slice.end ? slice.begin / kBlock : CeilDiv(slice.end, kBlock)});
  }
  return blocks;
}

}  // namespace weightbroker
