#include "common/memory/digest.h"

#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "common/memory/digest_word.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace weightbroker {
namespace {

static_assert(std::endian::native == std::endian::little, "wbd1 reads little-endian words");

using namespace wbd1;  // NOLINT(google-build-using-namespace): the words of the definition

using Lanes = std::array<uint64_t, 2>;

std::atomic<int> widest_vectors{512};

template <bool kCopy>
void AddWordsPortably(uint64_t first_word, const std::byte* source, size_t words, std::byte* destination,
                      Lanes& lanes) {
  Lanes sum = lanes;
  for (size_t i = 0; i < words; ++i) {
    uint64_t word;
    std::memcpy(&word, source + i * sizeof(word), sizeof(word));
    if constexpr (kCopy) std::memcpy(destination + i * sizeof(word), &word, sizeof(word));
    AddWord(word, first_word + i, sum.data());
  }
  lanes = sum;
}

#if defined(__x86_64__)

// What four words add to one lane; `summand` is the word itself or with its halves exchanged.
__attribute__((target("avx2"))) inline __m256i FourTerms(__m256i words, __m256i keys, __m256i summand) {
  const __m256i x = _mm256_xor_si256(words, keys);
  const __m256i sum = _mm256_add_epi64(_mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)), summand);
  return _mm256_xor_si256(sum, _mm256_srli_epi64(sum, 32));
}

__attribute__((target("avx2"))) inline uint64_t SumOfFour(__m256i lanes) {
  alignas(32) uint64_t parts[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(parts), lanes);
  return parts[0] + parts[1] + parts[2] + parts[3];
}

__attribute__((target("avx2"))) inline __m256i FourKeys(int lane, uint64_t first_word) {
  const auto key = [&](uint64_t i) { return static_cast<long long>(Key(lane, first_word + i)); };
  return _mm256_set_epi64x(key(3), key(2), key(1), key(0));
}

template <bool kCopy>
__attribute__((target("avx2"))) void AddWordsWithAvx2(uint64_t first_word, const std::byte* source, size_t words,
                                                      std::byte* destination, Lanes& lanes) {
  constexpr size_t kStride = 8;  // two vectors: one alone waits for its own multiplications
  const __m256i step0 = _mm256_set1_epi64x(static_cast<long long>(kStride * kKeyStep0));
  const __m256i step1 = _mm256_set1_epi64x(static_cast<long long>(kStride * kKeyStep1));
  __m256i keys0[2] = {FourKeys(0, first_word), FourKeys(0, first_word + 4)};
  __m256i keys1[2] = {FourKeys(1, first_word), FourKeys(1, first_word + 4)};
  __m256i sums0[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  __m256i sums1[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  size_t i = 0;
  for (; i + kStride <= words; i += kStride) {
    for (size_t v = 0; v < 2; ++v) {
      const std::byte* const from = source + (i + 4 * v) * sizeof(uint64_t);
      const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      if constexpr (kCopy) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(destination + (i + 4 * v) * sizeof(uint64_t)), w);
      }
      sums0[v] = _mm256_add_epi64(sums0[v], FourTerms(w, keys0[v], w));
      const __m256i exchanged = _mm256_shuffle_epi32(w, _MM_SHUFFLE(2, 3, 0, 1));
      sums1[v] = _mm256_add_epi64(sums1[v], FourTerms(w, keys1[v], exchanged));
      keys0[v] = _mm256_add_epi64(keys0[v], step0);
      keys1[v] = _mm256_add_epi64(keys1[v], step1);
    }
  }
  lanes[0] += SumOfFour(_mm256_add_epi64(sums0[0], sums0[1]));
  lanes[1] += SumOfFour(_mm256_add_epi64(sums1[0], sums1[1]));
  const size_t done_bytes = i * sizeof(uint64_t);
  AddWordsPortably<kCopy>(first_word + i, source + done_bytes, words - i, kCopy ? destination + done_bytes : nullptr,
                          lanes);
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of the intrinsics' own code, in GCC 12
#endif

// The same eight at a time.
__attribute__((target("avx512f"))) inline __m512i EightTerms(__m512i words, __m512i keys, __m512i summand) {
  const __m512i x = _mm512_xor_si512(words, keys);
  const __m512i sum = _mm512_add_epi64(_mm512_mul_epu32(x, _mm512_srli_epi64(x, 32)), summand);
  return _mm512_xor_si512(sum, _mm512_srli_epi64(sum, 32));
}

__attribute__((target("avx512f"))) inline uint64_t SumOfEight(__m512i lanes) {
  alignas(64) uint64_t parts[8];
  _mm512_store_si512(parts, lanes);
  uint64_t sum = 0;
  for (const uint64_t part : parts) sum += part;
  return sum;
}

__attribute__((target("avx512f"))) inline __m512i EightKeys(int lane, uint64_t first_word) {
  const auto key = [&](uint64_t i) { return static_cast<long long>(Key(lane, first_word + i)); };
  return _mm512_set_epi64(key(7), key(6), key(5), key(4), key(3), key(2), key(1), key(0));
}

template <bool kCopy>
__attribute__((target("avx512f"))) void AddWordsWithAvx512(uint64_t first_word, const std::byte* source, size_t words,
                                                           std::byte* destination, Lanes& lanes) {
  constexpr size_t kStride = 16;  // two vectors, as above
  const __m512i step0 = _mm512_set1_epi64(static_cast<long long>(kStride * kKeyStep0));
  const __m512i step1 = _mm512_set1_epi64(static_cast<long long>(kStride * kKeyStep1));
  __m512i keys0[2] = {EightKeys(0, first_word), EightKeys(0, first_word + 8)};
  __m512i keys1[2] = {EightKeys(1, first_word), EightKeys(1, first_word + 8)};
  __m512i sums0[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  __m512i sums1[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  size_t i = 0;
  for (; i + kStride <= words; i += kStride) {
    for (size_t v = 0; v < 2; ++v) {
      const __m512i w = _mm512_loadu_si512(source + (i + 8 * v) * sizeof(uint64_t));
      if constexpr (kCopy) _mm512_storeu_si512(destination + (i + 8 * v) * sizeof(uint64_t), w);
      sums0[v] = _mm512_add_epi64(sums0[v], EightTerms(w, keys0[v], w));
      sums1[v] = _mm512_add_epi64(sums1[v], EightTerms(w, keys1[v], _mm512_rol_epi64(w, 32)));
      keys0[v] = _mm512_add_epi64(keys0[v], step0);
      keys1[v] = _mm512_add_epi64(keys1[v], step1);
    }
  }
  lanes[0] += SumOfEight(_mm512_add_epi64(sums0[0], sums0[1]));
  lanes[1] += SumOfEight(_mm512_add_epi64(sums1[0], sums1[1]));
  const size_t done_bytes = i * sizeof(uint64_t);
  AddWordsPortably<kCopy>(first_word + i, source + done_bytes, words - i, kCopy ? destination + done_bytes : nullptr,
                          lanes);
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#endif

template <bool kCopy>
void AddWords(uint64_t first_word, const std::byte* source, size_t words, std::byte* destination, Lanes& lanes) {
#if defined(__x86_64__)
  static const bool has_avx512 = __builtin_cpu_supports("avx512f");
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  const int widest = widest_vectors.load(std::memory_order_relaxed);
  if (has_avx512 && widest >= 512) {
    AddWordsWithAvx512<kCopy>(first_word, source, words, destination, lanes);
    return;
  }
  if (has_avx2 && widest >= 256) {
    AddWordsWithAvx2<kCopy>(first_word, source, words, destination, lanes);
    return;
  }
#endif
  AddWordsPortably<kCopy>(first_word, source, words, destination, lanes);
}

uint64_t FirstWordOf(int64_t offset_bytes) {
  if (offset_bytes < 0 || offset_bytes % kDigestWordBytes != 0) {
    std::fprintf(stderr, "wbd1: a part starts at byte %lld, which is no multiple of 8\n",
                 static_cast<long long>(offset_bytes));
    std::abort();
  }
  return static_cast<uint64_t>(offset_bytes / kDigestWordBytes);
}

// The last word of a tensor whose size is no multiple of 8, filled up with zeros.
uint64_t TailWord(std::span<const std::byte> tail) {
  uint64_t word = 0;
  std::memcpy(&word, tail.data(), tail.size());
  return word;
}

template <bool kCopy>
void AddPart(int64_t offset_bytes, std::span<const std::byte> source, std::byte* destination, Lanes& lanes) {
  const uint64_t first_word = FirstWordOf(offset_bytes);
  const size_t words = source.size() / sizeof(uint64_t);
  AddWords<kCopy>(first_word, source.data(), words, destination, lanes);
  const auto tail = source.subspan(words * sizeof(uint64_t));
  if (tail.empty()) return;
  if constexpr (kCopy) std::memcpy(destination + words * sizeof(uint64_t), tail.data(), tail.size());
  AddWord(TailWord(tail), first_word + words, lanes.data());
}

}  // namespace

void LimitDigestVectors(int bits) { widest_vectors = bits; }

void DigestAccumulator::Add(int64_t offset_bytes, std::span<const std::byte> bytes) {
  AddPart<false>(offset_bytes, bytes, nullptr, lanes_);
}

void DigestAccumulator::AddCopy(int64_t offset_bytes, std::span<const std::byte> source, std::byte* destination) {
  AddPart<true>(offset_bytes, source, destination, lanes_);
}

void DigestAccumulator::Merge(const DigestAccumulator& other) {
  for (size_t lane = 0; lane < lanes_.size(); ++lane) lanes_[lane] += other.lanes_[lane];
}

Digest DigestAccumulator::Finish(int64_t size_bytes) const {
  const uint64_t first = Spread(lanes_[0] + Spread(static_cast<uint64_t>(size_bytes) + kKeyStep0));
  const uint64_t second = Spread(lanes_[1] + first);
  Digest digest;
  std::memcpy(digest.data(), &first, sizeof(first));
  std::memcpy(digest.data() + sizeof(first), &second, sizeof(second));
  return digest;
}

Digest ComputeDigest(std::span<const std::byte> bytes) {
  DigestAccumulator accumulator;
  accumulator.Add(0, bytes);
  return accumulator.Finish(static_cast<int64_t>(bytes.size()));
}

std::string DigestHex(const Digest& digest) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte b : digest) {
    text.push_back(kDigits[std::to_integer<unsigned>(b) >> 4]);
    text.push_back(kDigits[std::to_integer<unsigned>(b) & 15]);
  }
  return text;
}

}  // namespace weightbroker
