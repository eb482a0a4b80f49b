// Plays the threads of the GPU's kernel one after the other: the same loads, stores and arithmetic, without a GPU.
#include "common/quant/fp8_block_tile.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "common/quant/convert.h"
#include "common/quant/fp8_block.h"
#include "tests/support/play_fp8_kernel.h"

namespace weightbroker {
namespace {

struct Case {
  int64_t rows;
  int64_t columns;
  int64_t misalignment;  // of source and result, in bytes
  int64_t row_gap;       // elements of the result's row that are not its
};

template <typename Format>
void ExpectSameBytes(v1::DataType dtype, const Case& c, const std::vector<float>& values) {
  const DtypeInfo& from = *FindDtype(dtype);
  const int64_t row_bytes = c.columns * from.bits / 8;
  std::vector<std::byte> source(static_cast<size_t>(c.rows * row_bytes + 16));
  std::byte* const first = source.data() + c.misalignment;
  ConvertElements(*FindDtype(v1::DATA_TYPE_F32), reinterpret_cast<const std::byte*>(values.data()), from, first,
                  c.rows * c.columns);
  const int64_t result_row = c.columns + c.row_gap;
  const int64_t scale_columns = (c.columns + 127) / 128;
  const auto size = static_cast<size_t>(c.rows * result_row + 16);
  const auto scale_count = static_cast<size_t>((c.rows + 127) / 128 * scale_columns);
  std::vector<std::byte> codes(size);
  std::vector<std::byte> wanted_codes(size);
  std::vector<float> scales(scale_count);
  std::vector<float> wanted_scales(scale_count);
  ASSERT_FALSE(QuantizeFp8Block({.dtype = &from, .data = first, .row_bytes = row_bytes}, c.rows, c.columns,
                                {.data = wanted_codes.data() + c.misalignment,
                                 .row_elements = result_row,
                                 .scales = wanted_scales.data(),
                                 .scale_stride = scale_columns})
                   .has_value());
  uint64_t not_finite = ~uint64_t{0};
  testing::PlayFp8Kernel<Format>({.from = reinterpret_cast<uint64_t>(first),
                                  .from_row_bytes = row_bytes,
                                  .to = reinterpret_cast<uint64_t>(codes.data() + c.misalignment),
                                  .to_row_elements = result_row,
                                  .scales = reinterpret_cast<uint64_t>(scales.data()),
                                  .scale_row_elements = scale_columns,
                                  .rows = c.rows,
                                  .columns = c.columns,
                                  .not_finite = reinterpret_cast<uint64_t>(&not_finite),
                                  .not_finite_base = 0});
  EXPECT_EQ(not_finite, ~uint64_t{0});
  ASSERT_EQ(codes, wanted_codes) << "bytes beside the matrix are to stay as they are, too";
  ASSERT_EQ(scales, wanted_scales);
}

TEST(Fp8BlockTile, GivesTheBytesOfTheCpuAtAnyShapeAndAlignment) {
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  for (const Case& c : {Case{128, 128, 0, 0}, Case{256, 384, 0, 0}, Case{130, 264, 0, 24}, Case{77, 191, 0, 3},
                        Case{129, 136, 1, 5}, Case{1, 1, 3, 0}}) {
    std::vector<float> values;
    for (int64_t i = 0; i < c.rows * c.columns; ++i) {
      values.push_back(i % 11 == 0 ? 0 : normal(random) * std::ldexp(1.0F, static_cast<int>(i % 37) - 30));
    }
    ExpectSameBytes<Bf16Format>(v1::DATA_TYPE_BF16, c, values);
    ExpectSameBytes<F16Format>(v1::DATA_TYPE_F16, c, values);
    ExpectSameBytes<F32Format>(v1::DATA_TYPE_F32, c, values);
  }
}

TEST(Fp8BlockTile, GivesTheBytesOfTheCpuForEveryFiniteBf16) {
  std::vector<float> values;
  for (uint32_t bits = 0; bits < 65'536; ++bits) {
    const float value = Bf16ToF32(static_cast<uint16_t>(bits));
    values.push_back(std::isfinite(value) ? value : 0);
  }
  ExpectSameBytes<Bf16Format>(v1::DATA_TYPE_BF16, {256, 256, 0, 0}, values);
  for (float& value : values) value = std::abs(value) < 1 ? value : 0.5F;
  ExpectSameBytes<Bf16Format>(v1::DATA_TYPE_BF16, {256, 256, 0, 0}, values);
}

TEST(Fp8BlockTile, NamesTheFirstValueThatIsNotFinite) {
  std::vector<float> values(200 * 300, 1);
  values[150 * 300 + 299] = std::numeric_limits<float>::infinity();
  values[150 * 300 + 260] = std::numeric_limits<float>::quiet_NaN();
  std::vector<std::byte> codes(values.size());
  std::vector<float> scales(6);
  uint64_t not_finite = ~uint64_t{0};
  testing::PlayFp8Kernel<F32Format>({.from = reinterpret_cast<uint64_t>(values.data()),
                                     .from_row_bytes = 1200,
                                     .to = reinterpret_cast<uint64_t>(codes.data()),
                                     .to_row_elements = 300,
                                     .scales = reinterpret_cast<uint64_t>(scales.data()),
                                     .scale_row_elements = 3,
                                     .rows = 200,
                                     .columns = 300,
                                     .not_finite = reinterpret_cast<uint64_t>(&not_finite),
                                     .not_finite_base = 7});
  EXPECT_EQ(not_finite, 7u + 150 * 300 + 260);
}

}  // namespace
}  // namespace weightbroker
