// The wbd1 digest of a tensor's bytes: position-dependent and summed over 64-bit words, so that any number of threads
// (or a GPU) can each digest a part at memory speed and the parts add up. 128 bits. It finds accidents (a torn read, a
// flipped bit, a swapped block), not attacks: it is not cryptographic. Defined in docs/manifest-format.md.
//
//   DigestAccumulator sum;
//   sum.Add(0, first_half);  sum.Add(first_half.size(), second_half);   // any order, any thread with its own
//   accumulator const Digest digest = sum.Finish(total_bytes);
//
// Parts are cut between words: `offset_bytes` is a multiple of kDigestWordBytes, and so is a part's length, except at
// the end of the tensor. A word that is cut in two has no digest of its own halves, so a part that breaks the rule ends
// the process: it is a fault in the program, never in its input. Not thread-safe; use one accumulator for each thread
// and Merge.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace weightbroker {

inline constexpr int64_t kDigestWordBytes = 8;
inline constexpr char kDigestName[] = "wbd1";

using Digest = std::array<std::byte, 16>;

class DigestAccumulator {
 public:
  DigestAccumulator() = default;
  // One that has seen what a GPU has summed up: the two lanes of the definition.
  explicit DigestAccumulator(const std::array<uint64_t, 2>& lanes) : lanes_(lanes) {}

  // Adds the bytes that lie at `offset_bytes` of the tensor. Parts must not overlap.
  void Add(int64_t offset_bytes, std::span<const std::byte> bytes);

  // The same, copying `source` to `destination` (as long, no overlap) while it is in cache.
  void AddCopy(int64_t offset_bytes, std::span<const std::byte> source, std::byte* destination);

  // Adds what another accumulator has seen of the same tensor.
  void Merge(const DigestAccumulator& other);

  // The digest of a tensor of `size_bytes`, all of which has been added. Leaves the accumulator as it is.
  Digest Finish(int64_t size_bytes) const;

 private:
  std::array<uint64_t, 2> lanes_ = {0, 0};
};

// The digest of all of `bytes`.
Digest ComputeDigest(std::span<const std::byte> bytes);

// AddCopy under the name that reads well where the copy is what matters.
inline void CopyAndDigest(int64_t offset_bytes, std::span<const std::byte> source, std::byte* destination,
                          DigestAccumulator& accumulator) {
  accumulator.AddCopy(offset_bytes, source, destination);
}

// For tests of each way to compute it: this process uses no vectors wider than `bits`, 512, 256 or 0, from now on.
void LimitDigestVectors(int bits);

// 32 lower-case hexadecimal digits.
std::string DigestHex(const Digest& digest);

}  // namespace weightbroker
