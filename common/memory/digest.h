// The wbd1 digest of a tensor's bytes: position-dependent and summed over 64-bit words, so that any number of threads (or
// a GPU) can each digest a part at memory speed and the parts add up. 128 bits. It finds accidents (a torn read, a flipped
// bit, a swapped block), not attacks: it is not cryptographic. Defined in docs/manifest-format.md.
//
//   DigestAccumulator sum;
//   sum.Add(0, first_half);  sum.Add(first_half.size(), second_half);   // any order, any thread with its own accumulator
//   const Digest digest = sum.Finish(total_bytes);
//
// Not thread-safe; use one accumulator for each thread and Merge.
#pragma once

#include <array>
#include <cstdint>
#include <cstddef>
#include <span>
#include <string>

namespace weightbroker {

using Digest = std::array<std::byte, 16>;

class DigestAccumulator {
 public:
  // Adds the bytes that lie at `offset_bytes` of the tensor. Any offset and length: words that are cut by a part's edge
  // are handled by zero-filling, so parts must not overlap, and offsets that are multiples of 8 are fastest.
  void Add(int64_t offset_bytes, std::span<const std::byte> bytes);

  // Adds what another accumulator has seen of the same tensor. Both must have been cut at multiples of 8 bytes.
  void Merge(const DigestAccumulator& other);

  // The digest of a tensor of `size_bytes`, all of which has been added. Leaves the accumulator as it is.
  Digest Finish(int64_t size_bytes) const;

 private:
  uint64_t lanes_[2] = {0, 0};
};

// The digest of all of `bytes`.
Digest ComputeDigest(std::span<const std::byte> bytes);

// The same, copying `source` to `destination` (equal sizes, no overlap) while it is in cache.
void CopyAndDigest(int64_t offset_bytes, std::span<const std::byte> source, std::byte* destination,
                   DigestAccumulator& accumulator);

// 32 lower-case hexadecimal digits.
std::string DigestHex(const Digest& digest);

}  // namespace weightbroker
