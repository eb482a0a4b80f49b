// One block of 128x128 as a GPU quantizes it to FP8: shared by the kernel, whoever launches it, and a test that plays
// all of its threads on the CPU. The bytes are those of fp8_block.h.
//
// A block of threads takes a block of the matrix. Each thread has kFp8Vectors times 8 neighbouring elements of a row,
// loads them once, keeps them in registers while the threads agree on the largest, and stores their codes:
//
//   Fp8Tile<Bf16Format> tile(launch, block, thread);
//   tile.Load();
//   const uint32_t amax_bits = <the largest of all threads' tile.AmaxBits()>;
//   if (amax_bits >= kFp8InfinityBits) <tile.FirstNotFinite()>;  else tile.Store(Fp8Inverse(Fp8Scale(amax_bits)));
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define WEIGHTBROKER_FP8_FUNCTION __host__ __device__ __forceinline__
#define WEIGHTBROKER_FP8_UNROLL _Pragma("unroll")
#else
#define WEIGHTBROKER_FP8_FUNCTION inline
#define WEIGHTBROKER_FP8_UNROLL
#endif

namespace weightbroker {

inline constexpr char kFp8KernelBf16[] = "weightbroker_fp8_block_bf16";
inline constexpr char kFp8KernelF16[] = "weightbroker_fp8_block_f16";
inline constexpr char kFp8KernelF32[] = "weightbroker_fp8_block_f32";
inline constexpr unsigned kFp8Threads = 256;  // of a block, of which the grid has one for each block of the matrix

inline constexpr int kFp8Side = 128;
inline constexpr int kFp8VectorElements = 8;
inline constexpr int kFp8ThreadsPerRow = kFp8Side / kFp8VectorElements;
inline constexpr int kFp8RowsPerPass = static_cast<int>(kFp8Threads) / kFp8ThreadsPerRow;
inline constexpr int kFp8Vectors = kFp8Side / kFp8RowsPerPass;
inline constexpr uint32_t kFp8InfinityBits = 0x7F800000;  // of F32

// The kernel's parameter. Addresses are the device's. Nothing needs to be aligned but the scales; what is aligned to 16
// bytes, in every row, is faster.
struct Fp8BlockLaunch {
  uint64_t from = 0;
  int64_t from_row_bytes = 0;
  uint64_t to = 0;
  int64_t to_row_elements = 0;
  uint64_t scales = 0;
  int64_t scale_row_elements = 0;
  int64_t rows = 0;
  int64_t columns = 0;
  // Of an unsigned 64-bit number that is ~0 before: not_finite_base + row * to_row_elements + column of the first value
  // that is not finite, if there is one.
  uint64_t not_finite = 0;
  int64_t not_finite_base = 0;

  WEIGHTBROKER_FP8_FUNCTION int64_t BlockColumns() const { return (columns + kFp8Side - 1) / kFp8Side; }
  WEIGHTBROKER_FP8_FUNCTION int64_t BlockCount() const { return (rows + kFp8Side - 1) / kFp8Side * BlockColumns(); }
};

namespace fp8_internal {

WEIGHTBROKER_FP8_FUNCTION float FromBits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

WEIGHTBROKER_FP8_FUNCTION uint32_t ToBits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

WEIGHTBROKER_FP8_FUNCTION float Multiply(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);  // never part of a fused multiply-add
#else
  return a * b;
#endif
}

WEIGHTBROKER_FP8_FUNCTION float Divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// Two codes, that of `low` in the low byte. Magnitudes are at most 448, give or take an ulp.
WEIGHTBROKER_FP8_FUNCTION uint32_t EncodeTwo(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
#else
  uint32_t codes = 0;
  for (int i = 0; i < 2; ++i) {
    const uint32_t bits = ToBits(i == 0 ? low : high);
    const uint32_t magnitude = bits & 0x7FFFFFFF;
    // See fp8_block.cc.
    const uint32_t code = magnitude < 0x3C800000 ? ToBits(FromBits(magnitude) + 16384.0F) - 0x46800000
                                                 : (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) - (120u << 23)) >> 20;
    codes |= (code | ((bits >> 24) & 0x80)) << (8 * i);
  }
  return codes;
#endif
}

// Copies 16 bytes, or as many as are there.
WEIGHTBROKER_FP8_FUNCTION void LoadVector(const unsigned char* from, uint32_t* words) {
#if defined(__CUDA_ARCH__)
  const uint4 vector = __ldcs(reinterpret_cast<const uint4*>(from));
  words[0] = vector.x;
  words[1] = vector.y;
  words[2] = vector.z;
  words[3] = vector.w;
#else
  std::memcpy(words, from, 16);
#endif
}

WEIGHTBROKER_FP8_FUNCTION void StoreVector(unsigned char* to, uint32_t low, uint32_t high) {
#if defined(__CUDA_ARCH__)
  __stcs(reinterpret_cast<uint2*>(to), make_uint2(low, high));
#else
  std::memcpy(to, &low, 4);
  std::memcpy(to + 4, &high, 4);
#endif
}

// Two 16-bit magnitudes, each the larger of two.
WEIGHTBROKER_FP8_FUNCTION uint32_t LargerHalves(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __vmaxu2(a, b);
#else
  const uint32_t low = (a & 0xFFFF) > (b & 0xFFFF) ? a & 0xFFFF : b & 0xFFFF;
  return low | ((a >> 16) > (b >> 16) ? a & 0xFFFF0000 : b & 0xFFFF0000);
#endif
}

WEIGHTBROKER_FP8_FUNCTION float HalfToFloat(uint32_t half) {
  const uint32_t sign = (half & 0x8000) << 16;
  const uint32_t magnitude = (half & 0x7FFF) << 13;
  if (magnitude >= 0x7C00u << 13) return FromBits(sign | magnitude | kFp8InfinityBits);
  return FromBits(sign | ToBits(Multiply(FromBits(magnitude), 0x1p112F)));
}

}  // namespace fp8_internal

// What the elements of a matrix are: words of 32 bits that hold one or two of them, and how they become F32.
struct Bf16Format {
  static constexpr int kBytes = 2;
  WEIGHTBROKER_FP8_FUNCTION static float ToFloat(uint32_t bits) { return fp8_internal::FromBits(bits << 16); }
};
struct F16Format {
  static constexpr int kBytes = 2;
  WEIGHTBROKER_FP8_FUNCTION static float ToFloat(uint32_t bits) { return fp8_internal::HalfToFloat(bits); }
};
struct F32Format {
  static constexpr int kBytes = 4;
  WEIGHTBROKER_FP8_FUNCTION static float ToFloat(uint32_t bits) { return fp8_internal::FromBits(bits); }
};

WEIGHTBROKER_FP8_FUNCTION float Fp8Scale(uint32_t amax_bits) {
  const float amax = fp8_internal::FromBits(amax_bits);
  return fp8_internal::Divide(amax > 1e-4F ? amax : 1e-4F, 448.0F);
}

WEIGHTBROKER_FP8_FUNCTION float Fp8Inverse(float scale) { return fp8_internal::Divide(1.0F, scale); }

template <typename Format>
class Fp8Tile {
 public:
  WEIGHTBROKER_FP8_FUNCTION Fp8Tile(const Fp8BlockLaunch& launch, int64_t block, int thread)
      : launch_(launch),
        row_(block / launch.BlockColumns() * kFp8Side + thread / kFp8ThreadsPerRow),
        column_(block % launch.BlockColumns() * kFp8Side + thread % kFp8ThreadsPerRow * kFp8VectorElements) {}

  WEIGHTBROKER_FP8_FUNCTION void Load() {
    const bool whole =
        column_ + kFp8VectorElements <= launch_.columns && launch_.from % 16 == 0 && launch_.from_row_bytes % 16 == 0;
    WEIGHTBROKER_FP8_UNROLL
    for (int i = 0; i < kFp8Vectors; ++i) {
      uint32_t* const words = words_ + i * kWords;
      if (whole && RowOf(i) < launch_.rows) {
        WEIGHTBROKER_FP8_UNROLL
        for (int part = 0; part < kWords / 4; ++part) {
          fp8_internal::LoadVector(SourceOf(i, 0) + part * 16, words + part * 4);
        }
      } else {
        LoadElements(i, words);
      }
    }
  }

  // Of F32: the largest magnitude's bits; those of a NaN or an infinity are kFp8InfinityBits or more.
  WEIGHTBROKER_FP8_FUNCTION uint32_t AmaxBits() const {
    uint32_t amax = 0;
    if constexpr (Format::kBytes == 4) {
      WEIGHTBROKER_FP8_UNROLL
      for (int i = 0; i < kFp8Vectors * kWords; ++i) {
        const uint32_t magnitude = words_[i] & 0x7FFFFFFF;
        amax = magnitude > amax ? magnitude : amax;
      }
      return amax;
    }
    WEIGHTBROKER_FP8_UNROLL
    for (int i = 0; i < kFp8Vectors * kWords; ++i) amax = fp8_internal::LargerHalves(amax, words_[i] & 0x7FFF7FFF);
    const uint32_t larger = (amax & 0xFFFF) > (amax >> 16) ? amax & 0xFFFF : amax >> 16;
    return fp8_internal::ToBits(Format::ToFloat(larger));
  }

  // What `not_finite` is to be, of this thread's elements; ~0 if all are finite.
  WEIGHTBROKER_FP8_FUNCTION uint64_t FirstNotFinite() const {
    for (int i = 0; i < kFp8Vectors; ++i) {
      for (int e = 0; e < kFp8VectorElements; ++e) {
        if ((fp8_internal::ToBits(Element(i, e)) & 0x7FFFFFFF) < kFp8InfinityBits) continue;
        return static_cast<uint64_t>(launch_.not_finite_base + RowOf(i) * launch_.to_row_elements + column_ + e);
      }
    }
    return ~uint64_t{0};
  }

  WEIGHTBROKER_FP8_FUNCTION void Store(float inverse) const {
    const bool whole =
        column_ + kFp8VectorElements <= launch_.columns && launch_.to % 8 == 0 && launch_.to_row_elements % 8 == 0;
    WEIGHTBROKER_FP8_UNROLL
    for (int i = 0; i < kFp8Vectors; ++i) {
      if (RowOf(i) >= launch_.rows) continue;
      uint32_t codes[2] = {0, 0};
      WEIGHTBROKER_FP8_UNROLL
      for (int e = 0; e < kFp8VectorElements; e += 2) {
        codes[e / 4] |= fp8_internal::EncodeTwo(fp8_internal::Multiply(Element(i, e), inverse),
                                                fp8_internal::Multiply(Element(i, e + 1), inverse))
                        << (e % 4 * 8);
      }
      unsigned char* const to =
          reinterpret_cast<unsigned char*>(launch_.to) + RowOf(i) * launch_.to_row_elements + column_;
      if (whole) {
        fp8_internal::StoreVector(to, codes[0], codes[1]);
      } else {
        for (int e = 0; e < kFp8VectorElements && column_ + e < launch_.columns; ++e) {
          to[e] = static_cast<unsigned char>(codes[e / 4] >> (e % 4 * 8));
        }
      }
    }
  }

 private:
  static constexpr int kWords = kFp8VectorElements * Format::kBytes / 4;  // of a vector

  WEIGHTBROKER_FP8_FUNCTION int64_t RowOf(int vector) const { return row_ + vector * kFp8RowsPerPass; }

  WEIGHTBROKER_FP8_FUNCTION const unsigned char* SourceOf(int vector, int element) const {
    return reinterpret_cast<const unsigned char*>(launch_.from) + RowOf(vector) * launch_.from_row_bytes +
           (column_ + element) * Format::kBytes;
  }

  // One by one; what is outside the matrix is zero.
  WEIGHTBROKER_FP8_FUNCTION void LoadElements(int vector, uint32_t* words) const {
    for (int i = 0; i < kWords; ++i) words[i] = 0;
    if (RowOf(vector) >= launch_.rows) return;
    for (int e = 0; e < kFp8VectorElements && column_ + e < launch_.columns; ++e) {
      uint32_t bits = 0;
      for (int byte = 0; byte < Format::kBytes; ++byte) {
        bits |= static_cast<uint32_t>(SourceOf(vector, e)[byte]) << (8 * byte);
      }
      const int at = e * Format::kBytes;
      words[at / 4] |= bits << (at % 4 * 8);
    }
  }

  WEIGHTBROKER_FP8_FUNCTION float Element(int vector, int element) const {
    const int at = element * Format::kBytes;
    const uint32_t word = words_[vector * kWords + at / 4];
    if constexpr (Format::kBytes == 4) return Format::ToFloat(word);
    return Format::ToFloat(word >> (at % 4 * 8) & 0xFFFF);
  }

  const Fp8BlockLaunch& launch_;
  const int64_t row_;     // of this thread's first vector
  const int64_t column_;  // of all of them
  uint32_t words_[kFp8Vectors * kWords];
};

}  // namespace weightbroker
