// The bytes of a synthetic tensor: made from a seed, its name and the position, so that any part can be made anew.
// Floating-point values are finite and between 2^-8 and 2 in size, so that they can be quantized; scales are positive.
// Thread-safe: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "common/checkpoint/dtype.h"

namespace weightbroker {

class TensorContents {
 public:
  TensorContents(uint64_t seed, const std::string& name, const DtypeInfo& dtype);

  // The bytes from `offset_bytes` (a multiple of 8) on.
  void Fill(int64_t offset_bytes, std::span<std::byte> bytes) const;

 private:
  uint64_t WordAt(uint64_t index) const;

  uint64_t key_;
  uint64_t keep_ = ~uint64_t{0};  // the bits of a random word that stay
  uint64_t set_ = 0;              // those that are always one
};

}  // namespace weightbroker
