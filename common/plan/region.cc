#include "common/plan/region.h"

#include "common/quant/gate.h"

namespace weightbroker {
namespace {

constexpr int64_t kBlock = kFp8BlockSize[1];

int64_t Product(const std::vector<int64_t>& shape, size_t begin, size_t end) {
  int64_t product = 1;
  for (size_t i = begin; i < end; ++i) product *= shape[i];
  return product;
}

// Runs without a gap on either side are one.
void AppendRuns(Piece piece, std::vector<Piece>& pieces) {
  if (piece.run_elements == 0 || piece.run_count == 0) return;
  if (piece.run_count == 1 || (piece.source_stride == piece.run_elements && piece.stride == piece.run_elements)) {
    piece.run_elements *= piece.run_count;
    piece.run_count = 1;
    piece.source_stride = piece.stride = piece.run_elements;
  }
  pieces.push_back(piece);
}

}  // namespace

int64_t ElementCount(const std::vector<int64_t>& shape) { return Product(shape, 0, shape.size()); }

std::vector<int64_t> Region::ResultShape() const {
  std::vector<int64_t> result = shape;
  if (!result.empty()) result[static_cast<size_t>(axis)] = cut.length;
  if (is_stack) result[0] = stack.end - stack.begin;
  return result;
}

void AppendCopy(const Region& region, int64_t offset, std::vector<Piece>& pieces) {
  const std::vector<int64_t> source = region.shape.empty() ? std::vector<int64_t>{1} : region.shape;
  const auto axis = static_cast<size_t>(region.axis);
  const int64_t inner = Product(source, axis + 1, source.size());
  int64_t outer = Product(source, 0, axis);
  int64_t source_start = 0;
  if (region.is_stack) {
    outer = outer / source[0] * (region.stack.end - region.stack.begin);
    source_start = region.stack.begin * Product(source, 1, source.size());
  }
  int64_t landed = 0;
  for (const Slice& slice : region.cut.slices) {
    Piece piece;
    piece.source = region.source;
    piece.run_elements = (slice.end - slice.begin) * inner;
    piece.run_count = outer;
    piece.source_offset = source_start + slice.begin * inner;
    piece.source_stride = source[axis] * inner;
    piece.offset = offset + landed * inner;
    piece.stride = region.cut.length * inner;
    AppendRuns(piece, pieces);
    landed += slice.end - slice.begin;
  }
}

void AppendTransposed(const Region& region, int64_t offset, std::vector<Piece>& pieces) {
  const int64_t source_rows = region.shape[1];
  const int64_t source_columns = region.shape[2];
  const auto result = region.ResultShape();
  const int64_t experts_begin = region.is_stack ? region.stack.begin : 0;
  for (int64_t expert = 0; expert < result[0]; ++expert) {
    int64_t landed = 0;
    for (const Slice& slice : region.cut.slices) {
      const int64_t length = slice.end - slice.begin;
      const bool cuts_rows = region.axis == 1;
      Piece piece;
      piece.source = region.source;
      piece.run_elements = cuts_rows ? source_columns : length;
      piece.run_count = cuts_rows ? length : source_rows;
      piece.source_offset = (experts_begin + expert) * source_rows * source_columns +
                            (cuts_rows ? slice.begin * source_columns : slice.begin);
      piece.source_stride = source_columns;
      piece.element_stride = result[1];  // a column of the source becomes a row as long as the source's columns
      piece.offset = offset + expert * result[1] * result[2] + (cuts_rows ? landed : landed * result[1]);
      piece.stride = 1;
      if (piece.run_elements > 0 && piece.run_count > 0) pieces.push_back(piece);
      landed += length;
    }
  }
}

void AppendQuantized(const Region& region, int64_t offset, int64_t scale_offset, std::vector<Piece>& pieces) {
  const int64_t source_columns = region.shape[1];
  const auto result = region.ResultShape();
  const int64_t scale_columns = (result[1] + kBlock - 1) / kBlock;
  int64_t landed = 0;
  for (const Slice& slice : region.cut.slices) {
    const int64_t length = slice.end - slice.begin;
    const bool cuts_rows = region.axis == 0;
    Piece piece;
    piece.source = region.source;
    piece.run_elements = cuts_rows ? source_columns : length;
    piece.run_count = cuts_rows ? length : region.shape[0];
    piece.source_offset = cuts_rows ? slice.begin * source_columns : slice.begin;
    piece.source_stride = source_columns;
    piece.offset = offset + (cuts_rows ? landed * result[1] : landed);
    piece.stride = result[1];
    piece.scale_offset = scale_offset + (cuts_rows ? landed / kBlock * scale_columns : landed / kBlock);
    piece.scale_stride = scale_columns;
    if (piece.run_elements > 0 && piece.run_count > 0) pieces.push_back(piece);
    landed += length;
  }
}

}  // namespace weightbroker
