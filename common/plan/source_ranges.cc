#include "common/plan/source_ranges.h"

#include <algorithm>

namespace weightbroker {
namespace {

int64_t LastRun(const Piece& piece) { return piece.source_offset + (piece.run_count - 1) * piece.source_stride; }

void AddRanges(const PieceUse& use, int64_t element_bytes, std::vector<ByteRange>& ranges) {
  const Piece& piece = *use.piece;
  if (piece.run_count == 0 || piece.run_elements == 0) return;
  if (use.transform == Transform::kQuantizeFp8Block) {
    const int64_t row = piece.source_stride;
    const int64_t first = piece.source_offset / row * row;
    ranges.push_back({first * element_bytes, (first + piece.run_count * row) * element_bytes});
    return;
  }
  if ((piece.source_stride - piece.run_elements) * element_bytes <= kReadThroughBytes) {
    ranges.push_back({piece.source_offset * element_bytes, (LastRun(piece) + piece.run_elements) * element_bytes});
    return;
  }
  for (int64_t run = 0; run < piece.run_count; ++run) {
    const int64_t begin = piece.source_offset + run * piece.source_stride;
    ranges.push_back({begin * element_bytes, (begin + piece.run_elements) * element_bytes});
  }
}

}  // namespace

std::vector<ByteRange> WantedBytes(const CheckpointTensor& tensor, std::span<const PieceUse> uses) {
  std::vector<ByteRange> ranges;
  for (const PieceUse& use : uses) AddRanges(use, tensor.dtype->bits / 8, ranges);
  std::sort(ranges.begin(), ranges.end(),
            [](const ByteRange& a, const ByteRange& b) { return a.begin_bytes < b.begin_bytes; });
  std::vector<ByteRange> merged;
  for (const ByteRange& range : ranges) {
    if (merged.empty() || range.begin_bytes > merged.back().end_bytes + kReadThroughBytes) {
      merged.push_back(range);
    } else {
      merged.back().end_bytes = std::max(merged.back().end_bytes, range.end_bytes);
    }
  }
  return merged;
}

}  // namespace weightbroker
