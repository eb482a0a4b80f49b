// FP8 on a real GPU has the bytes of the CPU's, for every value in blocks of every class of amax.
#include <gmock/gmock.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "common/base/status_macros.h"
#include "common/device/cuda_context.h"
#include "common/device/gpu_quantizer.h"
#include "common/quant/convert.h"
#include "common/quant/fp8_block.h"
#include "tests/gpu/gpu_fixture.h"
#include "tests/support/status_matchers.h"

namespace weightbroker::testing {
namespace {

struct Matrix {
  std::string name;
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<float> values = {};
};

struct Quantized {
  std::vector<std::byte> codes;
  std::vector<float> scales;
  uint64_t not_finite = ~uint64_t{0};
};

std::vector<std::byte> InType(const DtypeInfo& dtype, const Matrix& matrix) {
  std::vector<std::byte> bytes(static_cast<size_t>(matrix.rows * matrix.columns * dtype.bits / 8));
  ConvertElements(*FindDtype(v1::DATA_TYPE_F32), reinterpret_cast<const std::byte*>(matrix.values.data()), dtype,
                  bytes.data(), matrix.rows * matrix.columns);
  return bytes;
}

int64_t ScaleColumns(const Matrix& matrix) { return (matrix.columns + 127) / 128; }
int64_t ScaleCount(const Matrix& matrix) { return (matrix.rows + 127) / 128 * ScaleColumns(matrix); }

Quantized OnCpu(const DtypeInfo& dtype, const Matrix& matrix) {
  Quantized result;
  const auto bytes = InType(dtype, matrix);
  result.codes.resize(static_cast<size_t>(matrix.rows * matrix.columns));
  result.scales.resize(static_cast<size_t>(ScaleCount(matrix)));
  const auto bad =
      QuantizeFp8Block({.dtype = &dtype, .data = bytes.data(), .row_bytes = matrix.columns * dtype.bits / 8},
                       matrix.rows, matrix.columns,
                       {.data = result.codes.data(),
                        .row_elements = matrix.columns,
                        .scales = result.scales.data(),
                        .scale_stride = ScaleColumns(matrix)});
  if (bad.has_value()) result.not_finite = static_cast<uint64_t>(bad->row * matrix.columns + bad->column);
  return result;
}

// Device memory for one matrix, by pieces.
class DeviceMemory {
 public:
  explicit DeviceMemory(CudaDriver& cuda) : cuda_(cuda) {}
  ~DeviceMemory() {
    for (const CudaDevicePtr address : addresses_) (void)cuda_.MemFree(address);
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  CudaDevicePtr Take(size_t size_bytes) {
    CudaDevicePtr address = 0;
    EXPECT_EQ(cuda_.MemAlloc(std::max<size_t>(size_bytes, 1), &address), kCudaSuccess);
    addresses_.push_back(address);
    return address;
  }

 private:
  CudaDriver& cuda_;
  std::vector<CudaDevicePtr> addresses_;
};

class GpuFp8Test : public GpuTest {
 protected:
  Quantized OnGpu(const DtypeInfo& dtype, const Matrix& matrix) {
    const CudaContext context = *CudaContext::Retain(**LoadCudaDriver(), 0);
    const GpuQuantizer quantizer = *GpuQuantizer::Create(context);
    const CudaScope current(context);
    CudaDriver& cuda = context.driver();
    DeviceMemory memory(cuda);
    const auto bytes = InType(dtype, matrix);
    Quantized result;
    result.codes.resize(static_cast<size_t>(matrix.rows * matrix.columns));
    result.scales.resize(static_cast<size_t>(ScaleCount(matrix)));
    const size_t scale_bytes = result.scales.size() * sizeof(float);
    const CudaDevicePtr source = memory.Take(bytes.size());
    const CudaDevicePtr codes = memory.Take(result.codes.size());
    const CudaDevicePtr scales = memory.Take(scale_bytes);
    const CudaDevicePtr not_finite = memory.Take(sizeof(uint64_t));
    CudaStream const stream = nullptr;
    EXPECT_EQ(cuda.MemcpyHtoDAsync(source, bytes.data(), bytes.size(), stream), kCudaSuccess);
    EXPECT_EQ(cuda.MemcpyHtoDAsync(not_finite, &result.not_finite, sizeof(uint64_t), stream), kCudaSuccess);
    EXPECT_THAT(quantizer.Launch(dtype.proto == v1::DATA_TYPE_BF16  ? Fp8Source::kBf16
                                 : dtype.proto == v1::DATA_TYPE_F16 ? Fp8Source::kF16
                                                                    : Fp8Source::kF32,
                                 {.from = source,
                                  .from_row_bytes = matrix.columns * dtype.bits / 8,
                                  .to = codes,
                                  .to_row_elements = matrix.columns,
                                  .scales = scales,
                                  .scale_row_elements = ScaleColumns(matrix),
                                  .rows = matrix.rows,
                                  .columns = matrix.columns,
                                  .not_finite = not_finite,
                                  .not_finite_base = 0},
                                 stream),
                IsOk());
    EXPECT_EQ(cuda.MemcpyDtoHAsync(result.codes.data(), codes, result.codes.size(), stream), kCudaSuccess);
    EXPECT_EQ(cuda.MemcpyDtoHAsync(result.scales.data(), scales, scale_bytes, stream), kCudaSuccess);
    EXPECT_EQ(cuda.MemcpyDtoHAsync(&result.not_finite, not_finite, sizeof(uint64_t), stream), kCudaSuccess);
    EXPECT_EQ(cuda.StreamSynchronize(stream), kCudaSuccess);
    return result;
  }

  void ExpectSame(v1::DataType type, const Matrix& matrix) {
    const DtypeInfo& dtype = *FindDtype(type);
    const Quantized cpu = OnCpu(dtype, matrix);
    const Quantized gpu = OnGpu(dtype, matrix);
    ASSERT_EQ(cpu.not_finite, ~uint64_t{0}) << matrix.name;
    ASSERT_EQ(gpu.not_finite, ~uint64_t{0}) << matrix.name;
    ASSERT_EQ(std::memcmp(gpu.scales.data(), cpu.scales.data(), cpu.scales.size() * sizeof(float)), 0) << matrix.name;
    for (size_t i = 0; i < cpu.codes.size(); ++i) ASSERT_EQ(gpu.codes[i], cpu.codes[i]) << matrix.name << " at " << i;
  }
};

// Every finite value of a 16-bit type in blocks of each class of amax that can hold it, one exponent apart.
std::vector<Matrix> ClassesOf(v1::DataType type) {
  std::vector<float> all;
  for (uint32_t bits = 0; bits < 65'536; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = type == v1::DATA_TYPE_BF16 ? Bf16ToF32(half) : F16ToF32(half);
    if (std::isfinite(value)) all.push_back(value);
  }
  const float top = type == v1::DATA_TYPE_BF16 ? Bf16ToF32(0x7F7F) : F16ToF32(0x7BFF);
  std::vector<Matrix> matrices;
  for (int exponent = -133; exponent < 128; ++exponent) {
    const float amax = std::min(std::ldexp(1.984375F, exponent), top);
    if (amax == 0) continue;
    Matrix matrix{.name = "amax " + std::to_string(amax), .rows = 0, .columns = 128};
    for (const float value : all) {
      if (std::abs(value) > amax) continue;
      if (matrix.values.size() % (128 * 128) == 0) matrix.values.push_back(amax);
      matrix.values.push_back(value);
    }
    matrix.rows = static_cast<int64_t>((matrix.values.size() + 127) / 128);
    matrix.values.resize(static_cast<size_t>(matrix.rows * 128), 0);
    matrices.push_back(std::move(matrix));
  }
  return matrices;
}

TEST_F(GpuFp8Test, HasTheBytesOfTheCpuForEveryValueInBlocksOfEveryClassOfAmax) {
  REQUIRE_GPUS(1);
  for (const v1::DataType type : {v1::DATA_TYPE_BF16, v1::DATA_TYPE_F16}) {
    for (const Matrix& matrix : ClassesOf(type)) ASSERT_NO_FATAL_FAILURE(ExpectSame(type, matrix));
  }
}

TEST_F(GpuFp8Test, HasTheBytesOfTheCpuAtAnyShape) {
  REQUIRE_GPUS(1);
  std::mt19937 random(8);
  std::normal_distribution<float> normal;
  std::vector<Matrix> matrices = {
      {.name = "random", .rows = 1024, .columns = 2048}, {.name = "ragged", .rows = 300, .columns = 517},
      {.name = "one column", .rows = 129, .columns = 1}, {.name = "zeros", .rows = 128, .columns = 256},
      {.name = "outlier", .rows = 256, .columns = 256},  {.name = "subnormal", .rows = 128, .columns = 128}};
  for (Matrix& matrix : matrices) {
    for (int64_t i = 0; i < matrix.rows * matrix.columns; ++i) {
      const float value = normal(random);
      matrix.values.push_back(matrix.name == "zeros"       ? 0
                              : matrix.name == "outlier"   ? 1e-3F
                              : matrix.name == "subnormal" ? value * 1e-40F
                                                           : value);
    }
    if (matrix.name == "outlier") matrix.values[77 * 256 + 200] = -3e4F;
    for (const v1::DataType type : {v1::DATA_TYPE_BF16, v1::DATA_TYPE_F16, v1::DATA_TYPE_F32}) {
      ASSERT_NO_FATAL_FAILURE(ExpectSame(type, matrix));
    }
  }
}

TEST_F(GpuFp8Test, SaysWhereAValueIsNotFinite) {
  REQUIRE_GPUS(1);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    for (const v1::DataType type : {v1::DATA_TYPE_BF16, v1::DATA_TYPE_F16, v1::DATA_TYPE_F32}) {
      Matrix matrix{.name = "bad", .rows = 300, .columns = 384, .values = std::vector<float>(300 * 384, 0.5F)};
      matrix.values[299 * 384 + 131] = bad;
      EXPECT_EQ(OnGpu(*FindDtype(type), matrix).not_finite, 299u * 384 + 131);
    }
  }
}

}  // namespace
}  // namespace weightbroker::testing
