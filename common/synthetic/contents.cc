#include "common/synthetic/contents.h"

#include <algorithm>
#include <cstring>

namespace weightbroker {
namespace {

constexpr char kScaleSuffix[] = "_scale_inv";
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;  // of SplitMix64

uint64_t Mix(uint64_t word) {
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
  return word ^ (word >> 31);
}

uint64_t Hash(uint64_t seed, const std::string& name) {
  uint64_t hash = Mix(seed + kGolden);
  for (const char c : name) hash = Mix(hash + static_cast<unsigned char>(c) + kGolden);
  return hash;
}

bool IsScale(const std::string& name) {
  constexpr size_t kLength = sizeof(kScaleSuffix) - 1;
  return name.size() > kLength && name.compare(name.size() - kLength, kLength, kScaleSuffix) == 0;
}

// For a word full of elements: which bits stay random, and which are set.
struct Masks {
  uint64_t keep;
  uint64_t set;
};

Masks MasksFor(v1::DataType dtype) {
  switch (dtype) {
    case v1::DATA_TYPE_BF16:  // exponents of 2^-7 to 2^0
    case v1::DATA_TYPE_F16:   // 2^0
      return {0x83FF83FF83FF83FFu, 0x3C003C003C003C00u};
    case v1::DATA_TYPE_F32:  // 2^-7 to 2^0
      return {0x83FFFFFF83FFFFFFu, 0x3C0000003C000000u};
    case v1::DATA_TYPE_F64:  // 2^0
      return {0x800FFFFFFFFFFFFFu, 0x3FF0000000000000u};
    case v1::DATA_TYPE_F8_E4M3:  // below 2^1: no NaN, which has every bit of the exponent
      return {0xBFBFBFBFBFBFBFBFu, 0};
    case v1::DATA_TYPE_BOOL:
      return {0x0101010101010101u, 0};
    default:
      return {~uint64_t{0}, 0};
  }
}

// Of each element in a word, the sign.
uint64_t SignBits(int bits) {
  if (bits == 16) return 0x8000800080008000u;
  return bits == 32 ? 0x8000000080000000u : 0x8000000000000000u;
}

}  // namespace

TensorContents::TensorContents(uint64_t seed, const std::string& name, const DtypeInfo& dtype)
    : key_(Hash(seed, name)) {
  const Masks masks = MasksFor(dtype.proto);
  keep_ = masks.keep;
  set_ = masks.set;
  if (IsScale(name)) keep_ &= ~SignBits(dtype.bits);
}

uint64_t TensorContents::WordAt(uint64_t index) const { return (Mix(key_ + index * kGolden) & keep_) | set_; }

void TensorContents::Fill(int64_t offset_bytes, std::span<std::byte> bytes) const {
  auto index = static_cast<uint64_t>(offset_bytes) / sizeof(uint64_t);
  for (size_t at = 0; at < bytes.size(); at += sizeof(uint64_t)) {
    const uint64_t word = WordAt(index++);
    memcpy(bytes.data() + at, &word, std::min(sizeof(word), bytes.size() - at));
  }
}

}  // namespace weightbroker
