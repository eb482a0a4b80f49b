// Conversion between the floating-point types that weights have: F32, F16 and BF16, rounded to nearest even as engines
// round. What is too large for F16 becomes an infinity; a NaN stays one (quiet, its sign kept).
//
// Thread-safe: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "common/checkpoint/dtype.h"

namespace weightbroker {

// Whether ConvertElements can make one of the other.
bool IsConvertible(const DtypeInfo& dtype);

// Converts `count` elements at `source`, which need not be aligned, to `destination`, which is as its type wants it.
// Both types are convertible.
void ConvertElements(const DtypeInfo& from, const std::byte* source, const DtypeInfo& to, std::byte* destination,
                     int64_t count);

// Single values, by their bits.
float F16ToF32(uint16_t bits);
uint16_t F32ToF16(float value);
float Bf16ToF32(uint16_t bits);
uint16_t F32ToBf16(float value);

}  // namespace weightbroker
