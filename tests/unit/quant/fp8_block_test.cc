#include "common/quant/fp8_block.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "common/quant/convert.h"

namespace weightbroker {
namespace {

using ::testing::Each;

// The value of an E4M3 code, from the format's definition.
double E4m3Value(int code) {
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(1 + mantissa / 8.0, exponent - 7);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// The code nearest to `value`, by looking at all of them; of two that are as near, the even one.
int NearestE4m3(float value) {
  int best = 0;
  for (int code = 0; code < 0x7F; ++code) {
    const double distance = std::abs(E4m3Value(code) - std::abs(double{value}));
    const double best_distance = std::abs(E4m3Value(best) - std::abs(double{value}));
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) best = code;
  }
  return best | (std::signbit(value) ? 0x80 : 0);
}

struct Quantized {
  std::vector<std::byte> codes;
  std::vector<float> scales;
  std::optional<MatrixPosition> bad;
};

using Quantizer = decltype(&QuantizeFp8Block);

Quantized Quantize(Quantizer quantizer, v1::DataType dtype, const std::vector<float>& values, int64_t rows,
                   int64_t columns, int64_t misalignment = 0) {
  const DtypeInfo& from = *FindDtype(dtype);
  const int64_t element_bytes = from.bits / 8;
  std::vector<std::byte> source(static_cast<size_t>(rows * columns * element_bytes + misalignment));
  ConvertElements(*FindDtype(v1::DATA_TYPE_F32), reinterpret_cast<const std::byte*>(values.data()), from,
                  source.data() + misalignment, rows * columns);
  const int64_t scale_columns = (columns + 127) / 128;
  Quantized result;
  result.codes.resize(static_cast<size_t>(rows * columns));
  result.scales.resize(static_cast<size_t>((rows + 127) / 128 * scale_columns));
  result.bad = quantizer({.dtype = &from, .data = source.data() + misalignment, .row_bytes = columns * element_bytes},
                         rows, columns,
                         {.data = result.codes.data(),
                          .row_elements = columns,
                          .scales = result.scales.data(),
                          .scale_stride = scale_columns});
  return result;
}

std::vector<float> Values(int64_t count, const std::function<float(int64_t)>& value) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(value(i));
  return values;
}

TEST(Fp8Block, RoundsToTheNearestCodeAndTiesToEven) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (const float magnitude : {1e-30F, 1e-5F, 0.02F, 1.0F, 3e4F}) {
    const auto values = Values(128 * 128, [&](int64_t i) {
      return i % 5 == 0 ? magnitude * static_cast<float>(i % 64) / 64 : magnitude * normal(random);
    });
    const Quantized result = Quantize(&QuantizeFp8Block, v1::DATA_TYPE_F32, values, 128, 128);
    float amax = 1e-4F;
    for (const float value : values) amax = std::max(amax, std::abs(value));
    ASSERT_EQ(result.scales[0], amax / 448);
    const float inverse = 1 / result.scales[0];
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(std::to_integer<int>(result.codes[i]), NearestE4m3(values[i] * inverse)) << values[i];
    }
  }
}

TEST(Fp8Block, LeavesABlockOfZerosZero) {
  const Quantized result = Quantize(&QuantizeFp8Block, v1::DATA_TYPE_BF16, std::vector<float>(128 * 256, 0), 128, 256);
  EXPECT_THAT(result.codes, Each(std::byte{0}));
  EXPECT_THAT(result.scales, Each(1e-4F / 448));
}

TEST(Fp8Block, GivesTheLargestValueOfEachBlockTheLargestCode) {
  auto values = std::vector<float>(200 * 300, 0.001F);
  values[150 * 300 + 290] = -5;
  const Quantized result = Quantize(&QuantizeFp8Block, v1::DATA_TYPE_F32, values, 200, 300);
  EXPECT_EQ(std::to_integer<int>(result.codes[150 * 300 + 290]), 0xFE) << "-448";
  ASSERT_EQ(result.scales.size(), 6u);
  EXPECT_EQ(result.scales[5], 5.0F / 448);
  EXPECT_EQ(result.scales[0], 0.001F / 448);
}

TEST(Fp8Block, GivesTheSameBytesWithAndWithoutVectorInstructionsAtAnyShapeAndAlignment) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (const v1::DataType dtype : {v1::DATA_TYPE_BF16, v1::DATA_TYPE_F16, v1::DATA_TYPE_F32}) {
    for (const auto& [rows, columns] :
         {std::pair{128, 128}, std::pair{1, 1}, std::pair{130, 257}, std::pair{77, 191}}) {
      const auto values = Values(int64_t{rows} * columns, [&](int64_t i) {
        return normal(random) * std::ldexp(1.0F, static_cast<int>(i % 40) - 30);
      });
      const Quantized fast = Quantize(&QuantizeFp8Block, dtype, values, rows, columns, rows % 8);
      const Quantized portable = Quantize(&QuantizeFp8BlockPortably, dtype, values, rows, columns);
      ASSERT_EQ(fast.codes, portable.codes) << rows << " x " << columns;
      ASSERT_EQ(fast.scales, portable.scales) << rows << " x " << columns;
    }
  }
}

TEST(Fp8Block, FindsWhatIsNotFinite) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    for (const v1::DataType dtype : {v1::DATA_TYPE_BF16, v1::DATA_TYPE_F16, v1::DATA_TYPE_F32}) {
      auto values = std::vector<float>(200 * 300, 0.5F);
      values[199 * 300 + 131] = bad;
      const Quantized result = Quantize(&QuantizeFp8Block, dtype, values, 200, 300);
      ASSERT_TRUE(result.bad.has_value());
      EXPECT_EQ(result.bad->row, 199);
      EXPECT_EQ(result.bad->column, 131);
    }
  }
}

TEST(Convert, BringsEveryF16ToF32AndBack) {
  for (uint32_t bits = 0; bits < 65'536; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = F16ToF32(half);
    const int exponent = half >> 10 & 31;
    const int mantissa = half & 1023;
    if (exponent == 31) {
      EXPECT_EQ(std::isnan(value), mantissa != 0);
      EXPECT_EQ(std::isinf(value), mantissa == 0);
      EXPECT_EQ(F32ToF16(value), mantissa == 0 ? half : half | 0x200) << "a NaN is quiet";
      continue;
    }
    const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    ASSERT_EQ(std::abs(value), magnitude);
    ASSERT_EQ(F32ToF16(value), half);
  }
}

TEST(Convert, RoundsToTheNearestF16AndTiesToEven) {
  for (uint32_t bits = 0; bits + 1 < 0x7C00; ++bits) {
    const auto low = static_cast<uint16_t>(bits);
    const auto high = static_cast<uint16_t>(bits + 1);
    const float middle = (F16ToF32(low) + F16ToF32(high)) / 2;  // exact
    ASSERT_EQ(F32ToF16(middle), bits % 2 == 0 ? low : high);
    ASSERT_EQ(F32ToF16(std::nextafter(middle, 0.0F)), low);
    ASSERT_EQ(F32ToF16(std::nextafter(middle, 1e9F)), high);
  }
  EXPECT_EQ(F32ToF16(65'519.0F), 0x7BFF);
  EXPECT_EQ(F32ToF16(65'520.0F), 0x7C00) << "an infinity from here on";
}

TEST(Convert, RoundsToTheNearestBf16AndTiesToEven) {
  EXPECT_EQ(F32ToBf16(std::bit_cast<float>(0x3F808000u)), 0x3F80);
  EXPECT_EQ(F32ToBf16(std::bit_cast<float>(0x3F818000u)), 0x3F82);
  EXPECT_EQ(F32ToBf16(std::bit_cast<float>(0x3F808001u)), 0x3F81);
  EXPECT_EQ(F32ToBf16(std::bit_cast<float>(0x7F7FFFFFu)), 0x7F80) << "an infinity";
  EXPECT_EQ(F32ToBf16(std::bit_cast<float>(0xFF800001u)), 0xFFC0) << "a NaN, quiet, its sign kept";
  for (uint32_t bits = 0; bits < 0x7F80; ++bits) {
    ASSERT_EQ(F32ToBf16(Bf16ToF32(static_cast<uint16_t>(bits))), bits);
  }
}

TEST(Convert, KeepsBytesWhereTypesAreTheSame) {
  const uint32_t signalling = 0x7F800001;
  uint32_t out = 0;
  ConvertElements(*FindDtype("F32"), reinterpret_cast<const std::byte*>(&signalling), *FindDtype("F32"),
                  reinterpret_cast<std::byte*>(&out), 1);
  EXPECT_EQ(out, signalling);
}

}  // namespace
}  // namespace weightbroker
