// Block-wise FP8 quantization on the CPU: for each block of 128x128, amax in F32 clamped at 1e-4, scale = amax / 448,
// q = E4M3(x * (1 / scale)) rounded to nearest even. Blocks at the edges are as if filled up with zeros; a block of
// zeros stays zero. common/quant/fp8_block_cuda.h gives the same bytes on a GPU.
//
//   const auto bad = QuantizeFp8Block({.dtype = bf16, .data = rows, .row_bytes = 2 * columns}, rows, columns,
//                                     {.data = q, .row_elements = columns, .scales = s, .scale_stride = grid_columns});
//   if (bad.has_value()) ...                                  // a NaN or an infinity, and where
//
// Thread-safe: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "common/checkpoint/dtype.h"

namespace weightbroker {

inline constexpr float kFp8Max = 448;
inline constexpr float kFp8MinAmax = 1e-4F;

struct Fp8BlockSource {
  const DtypeInfo* dtype = nullptr;  // F32, F16 or BF16
  const std::byte* data = nullptr;   // need not be aligned
  int64_t row_bytes = 0;             // from one row to the next
};

struct Fp8BlockResult {
  std::byte* data = nullptr;
  int64_t row_elements = 0;  // from one row to the next
  float* scales = nullptr;   // of the first block
  int64_t scale_stride = 0;  // elements from one row of blocks to the next
};

struct MatrixPosition {
  int64_t row = 0;
  int64_t column = 0;
};

// Quantizes a matrix of `rows` x `columns`. Returns where the first value that is no finite number is, if there is one;
// the result is then not to be used.
std::optional<MatrixPosition> QuantizeFp8Block(const Fp8BlockSource& source, int64_t rows, int64_t columns,
                                               const Fp8BlockResult& result);

// The same without vector instructions, for tests to compare with.
std::optional<MatrixPosition> QuantizeFp8BlockPortably(const Fp8BlockSource& source, int64_t rows, int64_t columns,
                                                       const Fp8BlockResult& result);

}  // namespace weightbroker
