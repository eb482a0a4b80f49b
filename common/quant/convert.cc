#include "common/quant/convert.h"

#include <bit>
#include <cstring>

namespace weightbroker {
namespace {

constexpr uint32_t kSignBit = 0x80000000;
constexpr uint32_t kInfinity = 0x7F800000;

template <v1::DataType kType>
struct Format;
template <>
struct Format<v1::DATA_TYPE_F32> {
  using Bits = uint32_t;
  static float ToF32(Bits bits) { return std::bit_cast<float>(bits); }
  static Bits FromF32(float value) { return std::bit_cast<Bits>(value); }
};
template <>
struct Format<v1::DATA_TYPE_F16> {
  using Bits = uint16_t;
  static float ToF32(Bits bits) { return F16ToF32(bits); }
  static Bits FromF32(float value) { return F32ToF16(value); }
};
template <>
struct Format<v1::DATA_TYPE_BF16> {
  using Bits = uint16_t;
  static float ToF32(Bits bits) { return Bf16ToF32(bits); }
  static Bits FromF32(float value) { return F32ToBf16(value); }
};

template <v1::DataType kFrom, v1::DataType kTo>
void Convert(const std::byte* source, std::byte* destination, int64_t count) {
  using From = Format<kFrom>;
  using To = Format<kTo>;
  for (int64_t i = 0; i < count; ++i) {
    typename From::Bits in;
    std::memcpy(&in, source + i * static_cast<int64_t>(sizeof(in)), sizeof(in));
    const typename To::Bits out = To::FromF32(From::ToF32(in));
    std::memcpy(destination + i * static_cast<int64_t>(sizeof(out)), &out, sizeof(out));
  }
}

template <v1::DataType kFrom>
void ConvertFrom(const std::byte* source, v1::DataType to, std::byte* destination, int64_t count) {
  if (to == v1::DATA_TYPE_F32) return Convert<kFrom, v1::DATA_TYPE_F32>(source, destination, count);
  if (to == v1::DATA_TYPE_F16) return Convert<kFrom, v1::DATA_TYPE_F16>(source, destination, count);
  Convert<kFrom, v1::DATA_TYPE_BF16>(source, destination, count);
}

}  // namespace

bool IsConvertible(const DtypeInfo& dtype) {
  return dtype.proto == v1::DATA_TYPE_F32 || dtype.proto == v1::DATA_TYPE_F16 || dtype.proto == v1::DATA_TYPE_BF16;
}

void ConvertElements(const DtypeInfo& from, const std::byte* source, const DtypeInfo& to, std::byte* destination,
                     int64_t count) {
  if (from.proto == v1::DATA_TYPE_F32) return ConvertFrom<v1::DATA_TYPE_F32>(source, to.proto, destination, count);
  if (from.proto == v1::DATA_TYPE_F16) return ConvertFrom<v1::DATA_TYPE_F16>(source, to.proto, destination, count);
  ConvertFrom<v1::DATA_TYPE_BF16>(source, to.proto, destination, count);
}

float Bf16ToF32(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

uint16_t F32ToBf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & ~kSignBit) > kInfinity) return static_cast<uint16_t>(((bits & kSignBit) >> 16) | 0x7FC0);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

float F16ToF32(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7FFF) << 13;
  if (magnitude >= 0x7C00u << 13) {  // infinity or NaN
    const uint32_t payload = magnitude & 0x7FFFFF;
    return std::bit_cast<float>(sign | kInfinity | payload | (payload != 0 ? 0x400000u : 0u));
  }
  // The exponent's bias differs by 112; the multiplication by a power of two is exact, for subnormal values too.
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f));
}

uint16_t F32ToF16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits & kSignBit) >> 16);
  const uint32_t magnitude = bits & ~kSignBit;
  if (magnitude > kInfinity) return static_cast<uint16_t>(sign | 0x7E00 | ((magnitude >> 13) & 0x1FF));
  if (magnitude >= 0x47800000) return static_cast<uint16_t>(sign | 0x7C00);  // 65536 and above
  if (magnitude < 0x38800000) {
    // Subnormal: adding 0.5 leaves its multiple of 2^-24, rounded to nearest even, in the low bits.
    const float rounded = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(rounded) - std::bit_cast<uint32_t>(0.5f)));
  }
  const uint32_t rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

}  // namespace weightbroker
