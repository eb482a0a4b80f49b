// What one word adds to a wbd1 digest (see digest.h and docs/manifest-format.md): the part that the CPU and the GPU
// share, so that there is one definition of it. Includes nothing that a GPU's compiler does not take. Pure functions.
#pragma once

#include <cstdint>

#include "common/device/kernels/host_device.h"

namespace weightbroker::wbd1 {

// Odd, so that the keys of 2^64 successive words all differ, in their low halves of 2^32 successive words.
inline constexpr uint64_t kKeyStep0 = 0x9E3779B97F4A7C15;
inline constexpr uint64_t kKeyStep1 = 0xD1B54A32D192ED03;

WEIGHTBROKER_HOST_DEVICE constexpr uint64_t Key(int lane, uint64_t word_index) {
  return (word_index + 1) * (lane == 0 ? kKeyStep0 : kKeyStep1);
}

WEIGHTBROKER_HOST_DEVICE constexpr uint64_t HalvesMultiplied(uint64_t x) { return (x & 0xFFFFFFFF) * (x >> 32); }

// Without it, changes in several words cancel, because the keys are an arithmetic progression: words A B B A and B A A
// B had the same digest for 393 of 384,000 choices of A and B one bit apart, and none has with it.
WEIGHTBROKER_HOST_DEVICE constexpr uint64_t Folded(uint64_t x) { return x ^ (x >> 32); }

WEIGHTBROKER_HOST_DEVICE constexpr uint64_t HalvesExchanged(uint64_t x) { return (x << 32) | (x >> 32); }

// The product depends on the position. The word itself, added plainly in one lane and with its halves exchanged in the
// other, makes every single flipped bit certain to change at least one lane: see docs/manifest-format.md.
WEIGHTBROKER_HOST_DEVICE constexpr void AddWordWithKeys(uint64_t word, uint64_t key0, uint64_t key1, uint64_t* lanes) {
  lanes[0] += Folded(HalvesMultiplied(word ^ key0) + word);
  lanes[1] += Folded(HalvesMultiplied(word ^ key1) + HalvesExchanged(word));
}

WEIGHTBROKER_HOST_DEVICE constexpr void AddWord(uint64_t word, uint64_t word_index, uint64_t* lanes) {
  AddWordWithKeys(word, Key(0, word_index), Key(1, word_index), lanes);
}

// A bijection that spreads every bit over all others (the finalizer of MurmurHash3).
WEIGHTBROKER_HOST_DEVICE constexpr uint64_t Spread(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD;
  x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53;
  return x ^ (x >> 33);
}

}  // namespace weightbroker::wbd1
