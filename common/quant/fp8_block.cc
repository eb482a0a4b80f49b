// Compiled without contraction: a multiplication and an addition that become one instruction round once instead of
// twice, and the bytes would depend on the machine.
#include "common/quant/fp8_block.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "common/quant/convert.h"
#include "common/quant/gate.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace weightbroker {
namespace {

constexpr int64_t kBlock = kFp8BlockSize[0];
static_assert(kFp8BlockSize[1] == kBlock);

constexpr uint32_t kSignBit = 0x80000000;
constexpr uint32_t kInfinity = 0x7F800000;
constexpr uint32_t kSmallestNormal = 0x3C800000;  // 2^-6, of E4M3
constexpr uint32_t kRebias = (127 - 7) << 23;     // from F32's exponent to E4M3's
constexpr float kSubnormalStep = 16384;           // its last bit is worth 2^-9, as E4M3's subnormal step is

// |value| is at most 448, give or take an ulp.
uint8_t ToE4m3(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & ~kSignBit;
  uint32_t code = 0;
  if (magnitude < kSmallestNormal) {
    code = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + kSubnormalStep) -
           std::bit_cast<uint32_t>(kSubnormalStep);
  } else {
    code = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) - kRebias) >> 20;
  }
  return static_cast<uint8_t>(code | ((bits & kSignBit) >> 24));
}

// Up to a block's width of one row, in F32.
using RowBuffer = float[kBlock];

// Loads rows of a block, quantizes rows of a block: one implementation for each instruction set.
struct Portable {
  static void Load(const DtypeInfo& dtype, const std::byte* source, int64_t count, float* row) {
    static const DtypeInfo& f32 = *FindDtype(v1::DATA_TYPE_F32);
    ConvertElements(dtype, source, f32, reinterpret_cast<std::byte*>(row), count);
  }
  // The largest of `amax` and the row's magnitudes, as bits: those order as the values do, with NaN above all.
  static uint32_t Amax(const float* row, int64_t count, uint32_t amax) {
    for (int64_t i = 0; i < count; ++i) amax = std::max(amax, std::bit_cast<uint32_t>(row[i]) & ~kSignBit);
    return amax;
  }
  static void Quantize(const float* row, int64_t count, float inverse, std::byte* result) {
    for (int64_t i = 0; i < count; ++i) result[i] = static_cast<std::byte>(ToE4m3(row[i] * inverse));
  }
};

#if defined(__x86_64__)

// What is left over of a row is done portably. BF16 and F32 are what weights are in; F16 is converted portably.
struct Avx2 {
  static constexpr int64_t kLanes = 8;

  __attribute__((target("avx2"))) static void Load(const DtypeInfo& dtype, const std::byte* source, int64_t count,
                                                   float* row) {
    if (dtype.proto != v1::DATA_TYPE_BF16) return Portable::Load(dtype, source, count, row);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + 2 * i));
      const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + i), bits);
    }
    Portable::Load(dtype, source + 2 * i, count - i, row + i);
  }

  __attribute__((target("avx2"))) static uint32_t Amax(const float* row, int64_t count, uint32_t amax) {
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(~kSignBit));
    __m256i lanes = _mm256_setzero_si256();
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + i));
      lanes = _mm256_max_epu32(lanes, _mm256_and_si256(bits, mask));
    }
    alignas(32) uint32_t parts[kLanes];
    _mm256_store_si256(reinterpret_cast<__m256i*>(parts), lanes);
    for (const uint32_t part : parts) amax = std::max(amax, part);
    return Portable::Amax(row + i, count - i, amax);
  }

  __attribute__((target("avx2"))) static __m256i Codes(const float* row, __m256 inverse) {
    const __m256i bits = _mm256_castps_si256(_mm256_mul_ps(_mm256_loadu_ps(row), inverse));
    const __m256i sign = _mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(kSignBit)));
    const __m256i magnitude = _mm256_xor_si256(bits, sign);
    const __m256 step = _mm256_set1_ps(kSubnormalStep);
    const __m256i subnormal = _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(magnitude), step)),
                                               _mm256_castps_si256(step));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(magnitude, 20), _mm256_set1_epi32(1));
    const __m256i rounding = _mm256_set1_epi32(static_cast<int>(0x7FFFF - kRebias));
    const __m256i normal = _mm256_srli_epi32(_mm256_add_epi32(magnitude, _mm256_add_epi32(odd, rounding)), 20);
    // Magnitudes are positive as signed numbers, too.
    const __m256i is_subnormal = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(kSmallestNormal)), magnitude);
    return _mm256_or_si256(_mm256_blendv_epi8(normal, subnormal, is_subnormal), _mm256_srli_epi32(sign, 24));
  }

  __attribute__((target("avx2"))) static void Quantize(const float* row, int64_t count, float inverse,
                                                       std::byte* result) {
    constexpr int64_t kStride = 4 * kLanes;
    const __m256 factor = _mm256_set1_ps(inverse);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing works on each half by itself
    int64_t i = 0;
    for (; i + kStride <= count; i += kStride) {
      const __m256i low = _mm256_packus_epi32(Codes(row + i, factor), Codes(row + i + kLanes, factor));
      const __m256i high =
          _mm256_packus_epi32(Codes(row + i + 2 * kLanes, factor), Codes(row + i + 3 * kLanes, factor));
      const __m256i packed = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(result + i), packed);
    }
    Portable::Quantize(row + i, count - i, inverse, result + i);
  }
};

#endif

std::optional<MatrixPosition> FindNotFinite(const RowBuffer* rows, int64_t row_count, int64_t column_count) {
  for (int64_t row = 0; row < row_count; ++row) {
    for (int64_t column = 0; column < column_count; ++column) {
      if ((std::bit_cast<uint32_t>(rows[row][column]) & ~kSignBit) >= kInfinity) return MatrixPosition{row, column};
    }
  }
  return std::nullopt;
}

template <typename Simd>
std::optional<MatrixPosition> QuantizeOneBlock(const Fp8BlockSource& source, int64_t rows, int64_t columns,
                                               std::byte* result, int64_t result_stride, float* scale) {
  alignas(64) RowBuffer values[kBlock];
  uint32_t amax_bits = 0;
  for (int64_t row = 0; row < rows; ++row) {
    Simd::Load(*source.dtype, source.data + row * source.row_bytes, columns, values[row]);
    amax_bits = Simd::Amax(values[row], columns, amax_bits);
  }
  if (amax_bits >= kInfinity) return FindNotFinite(values, rows, columns);
  *scale = std::max(std::bit_cast<float>(amax_bits), kFp8MinAmax) / kFp8Max;
  const float inverse = 1.0F / *scale;
  for (int64_t row = 0; row < rows; ++row) {
    Simd::Quantize(values[row], columns, inverse, result + row * result_stride);
  }
  return std::nullopt;
}

template <typename Simd>
std::optional<MatrixPosition> QuantizeBlocks(const Fp8BlockSource& source, int64_t rows, int64_t columns,
                                             const Fp8BlockResult& result) {
  const int64_t element_bytes = source.dtype->bits / 8;
  for (int64_t row = 0; row < rows; row += kBlock) {
    for (int64_t column = 0; column < columns; column += kBlock) {
      Fp8BlockSource block = source;
      block.data += row * source.row_bytes + column * element_bytes;
      const auto bad = QuantizeOneBlock<Simd>(block, std::min(kBlock, rows - row), std::min(kBlock, columns - column),
                                              result.data + row * result.row_elements + column, result.row_elements,
                                              result.scales + row / kBlock * result.scale_stride + column / kBlock);
      if (bad.has_value()) return MatrixPosition{row + bad->row, column + bad->column};
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<MatrixPosition> QuantizeFp8BlockPortably(const Fp8BlockSource& source, int64_t rows, int64_t columns,
                                                       const Fp8BlockResult& result) {
  return QuantizeBlocks<Portable>(source, rows, columns, result);
}

std::optional<MatrixPosition> QuantizeFp8Block(const Fp8BlockSource& source, int64_t rows, int64_t columns,
                                               const Fp8BlockResult& result) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2) return QuantizeBlocks<Avx2>(source, rows, columns, result);
#endif
  return QuantizeFp8BlockPortably(source, rows, columns, result);
}

}  // namespace weightbroker
