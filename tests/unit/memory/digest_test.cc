#include "common/memory/digest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "tests/support/temporary_folder.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using Bytes = std::vector<std::byte>;

Bytes RandomBytes(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(size);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

// wbd1 once more, word by word as docs/manifest-format.md defines it, so that the fast paths cannot drift from the
// page.
Digest DigestByTheBook(const Bytes& bytes) {
  uint64_t lane_0 = 0;
  uint64_t lane_1 = 0;
  for (size_t i = 0; i * 8 < bytes.size(); ++i) {
    uint64_t w = 0;
    for (size_t b = 0; b < 8 && i * 8 + b < bytes.size(); ++b) {
      w |= std::to_integer<uint64_t>(bytes[i * 8 + b]) << (8 * b);
    }
    const uint64_t x = w ^ (0x9E3779B97F4A7C15 * (i + 1));
    const uint64_t y = w ^ (0xD1B54A32D192ED03 * (i + 1));
    const uint64_t p = (x & 0xFFFFFFFF) * (x >> 32) + w;
    const uint64_t q = (y & 0xFFFFFFFF) * (y >> 32) + ((w << 32) | (w >> 32));
    lane_0 += p ^ (p >> 32);
    lane_1 += q ^ (q >> 32);
  }
  const auto spread = [](uint64_t v) {
    v ^= v >> 33;
    v *= 0xFF51AFD7ED558CCD;
    v ^= v >> 33;
    v *= 0xC4CEB9FE1A85EC53;
    return v ^ (v >> 33);
  };
  const uint64_t first = spread(lane_0 + spread(bytes.size() + 0x9E3779B97F4A7C15));
  const uint64_t second = spread(lane_1 + first);
  Digest digest;
  for (size_t b = 0; b < 8; ++b) {
    digest[b] = static_cast<std::byte>(first >> (8 * b));
    digest[8 + b] = static_cast<std::byte>(second >> (8 * b));
  }
  return digest;
}

// With vectors of at most so many bits.
class DigestVectorsTest : public ::testing::TestWithParam<int> {
 protected:
  DigestVectorsTest() { LimitDigestVectors(GetParam()); }
  ~DigestVectorsTest() override { LimitDigestVectors(512); }
};

TEST_P(DigestVectorsTest, IsWhatTheFormatPageDefinesForEveryLength) {
  for (size_t size = 0; size < 600; ++size) {
    const Bytes bytes = RandomBytes(size, size);
    Bytes copy(size);
    DigestAccumulator copied;
    CopyAndDigest(0, bytes, copy.data(), copied);
    ASSERT_EQ(DigestHex(ComputeDigest(bytes)), DigestHex(DigestByTheBook(bytes))) << size << " bytes";
    ASSERT_EQ(copied.Finish(static_cast<int64_t>(size)), DigestByTheBook(bytes)) << size << " bytes";
    ASSERT_EQ(copy, bytes);
  }
  const Bytes large = RandomBytes(1'000'003, 1);
  EXPECT_EQ(DigestHex(ComputeDigest(large)), DigestHex(DigestByTheBook(large)));
}

INSTANTIATE_TEST_SUITE_P(OfBits, DigestVectorsTest, ::testing::Values(0, 256, 512));

TEST(Digest, HasTheValuesThatTheFormatPageGivesAsExamples) {
  Bytes counting(1000);
  for (size_t i = 0; i < counting.size(); ++i) counting[i] = static_cast<std::byte>(i % 251);

  const std::string page = testing::ReadFile(std::string(WEIGHTBROKER_TEST_DATA) + "/../../docs/manifest-format.md");
  const auto row = [](const std::string& bytes, const Bytes& of) {
    return "| " + bytes + " | `" + DigestHex(ComputeDigest(of)) + "` |";
  };
  EXPECT_THAT(page, HasSubstr(row("none", {})));
  EXPECT_THAT(page, HasSubstr(row("8 zero bytes", Bytes(8))));
  EXPECT_THAT(page, HasSubstr(row("1,000 bytes, the one at index j being j mod 251", counting)));
}

TEST(Digest, ChangesWithEverySingleFlippedBit) {
  for (const Bytes& original : {RandomBytes(515, 7), Bytes(515), Bytes(515, std::byte{0xFF})}) {
    std::set<Digest> seen = {ComputeDigest(original)};
    Bytes bytes = original;
    for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
      bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
      ASSERT_TRUE(seen.insert(ComputeDigest(bytes)).second) << "bit " << bit;
      bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    }
  }
}

// The words for which one lane alone misses a flipped bit: a half that equals 1 after the key. The other lane sees it.
TEST(Digest, SeesAFlippedBitWhereOneLaneAloneCannot) {
  constexpr uint64_t kKeys[] = {0x9E3779B97F4A7C15, 0xD1B54A32D192ED03};
  for (const uint64_t key : kKeys) {
    for (const uint64_t x : {uint64_t{1}, uint64_t{1} << 32, (uint64_t{1} << 32) | 1, uint64_t{0}}) {
      for (int bit = 0; bit < 64; ++bit) {
        Bytes a(8);
        Bytes b(8);
        const uint64_t word = x ^ key;
        const uint64_t flipped = word ^ (uint64_t{1} << bit);
        std::memcpy(a.data(), &word, 8);
        std::memcpy(b.data(), &flipped, 8);
        ASSERT_NE(ComputeDigest(a), ComputeDigest(b)) << std::hex << x << " bit " << bit;
      }
    }
  }
}

TEST(Digest, ChangesWithEveryPairOfWordsThatIsSwapped) {
  // Words that differ in one bit only are the hardest to tell apart after a swap.
  constexpr size_t kWords = 64;
  for (int bit = 0; bit < 64; ++bit) {
    std::vector<uint64_t> words(kWords, 0x3F803F803F803F80);
    for (size_t i = 0; i < kWords; i += 2) words[i] ^= uint64_t{1} << bit;
    const Digest original = ComputeDigest(std::as_bytes(std::span(words)));
    for (size_t i = 0; i < kWords; i += 2) {
      for (size_t j = 1; j < kWords; j += 2) {
        std::swap(words[i], words[j]);
        ASSERT_NE(ComputeDigest(std::as_bytes(std::span(words))), original) << bit << ": " << i << ", " << j;
        std::swap(words[i], words[j]);
      }
    }
  }
}

TEST(Digest, ChangesWithEveryPairOfBlocksThatIsSwapped) {
  constexpr size_t kBlock = 512;
  constexpr size_t kBlocks = 16;
  Bytes bytes = RandomBytes(kBlock * kBlocks, 3);
  std::set<Digest> seen = {ComputeDigest(bytes)};
  for (size_t i = 0; i < kBlocks; ++i) {
    for (size_t j = i + 1; j < kBlocks; ++j) {
      const auto swap = [&] { std::swap_ranges(&bytes[i * kBlock], &bytes[i * kBlock] + kBlock, &bytes[j * kBlock]); };
      swap();
      ASSERT_TRUE(seen.insert(ComputeDigest(bytes)).second) << i << ", " << j;
      swap();
    }
  }
}

TEST(Digest, ChangesWithEveryTruncationAndEveryZeroAppended) {
  const Bytes bytes = RandomBytes(200, 5);
  std::set<Digest> seen;
  for (size_t size = 0; size <= bytes.size(); ++size) {
    ASSERT_TRUE(seen.insert(ComputeDigest(std::span(bytes).first(size))).second) << size;
  }
  std::set<Digest> zeros;
  for (size_t size = 0; size <= 200; ++size) {
    ASSERT_TRUE(zeros.insert(ComputeDigest(Bytes(size))).second) << size << " zeros";
  }
}

TEST(Digest, ChangesWhenDataMovesByOneWord) {
  Bytes bytes(800);
  std::set<Digest> seen;
  for (size_t at = 0; at < bytes.size(); at += 8) {
    bytes[at] = std::byte{1};
    ASSERT_TRUE(seen.insert(ComputeDigest(bytes)).second) << at;
    bytes[at] = std::byte{0};
  }
}

// 64 bits have no room for an accident among 184,000 draws, so one collision shows a fault in the construction.
TEST(Digest, HasNoCollisionInEitherHalfAmongPairsOfFlippedBits) {
  for (const uint64_t background : {uint64_t{0}, ~uint64_t{0}, uint64_t{0x3F803F803F803F80}}) {
    std::vector<uint64_t> words(16, background);
    const size_t bits = words.size() * 64;
    std::vector<uint64_t> halves[2];
    for (size_t i = 0; i < bits; ++i) {
      for (size_t j = i + 1; j < std::min(bits, i + 200); ++j) {
        words[i / 64] ^= uint64_t{1} << (i % 64);
        words[j / 64] ^= uint64_t{1} << (j % 64);
        const Digest digest = ComputeDigest(std::as_bytes(std::span(words)));
        for (size_t half = 0; half < 2; ++half) {
          std::memcpy(&halves[half].emplace_back(), digest.data() + 8 * half, 8);
        }
        words[i / 64] = background;
        words[j / 64] = background;
      }
    }
    for (auto& values : halves) {
      std::sort(values.begin(), values.end());
      EXPECT_EQ(std::adjacent_find(values.begin(), values.end()), values.end()) << std::hex << background;
    }
  }
}

// Four words whose changes cancel in any digest that is a sum of products with equally spaced keys.
TEST(Digest, ChangesWhenTwoOppositeSwapsBalanceEachOther) {
  std::mt19937_64 random(9);
  for (int round = 0; round < 3000; ++round) {
    const uint64_t a = round % 2 == 0 ? 0 : random();
    const uint64_t b = a ^ (uint64_t{1} << (round % 64));
    const size_t distance = 1 + random() % 5;
    const size_t positions[] = {0, distance, 5 * distance, 6 * distance};
    std::vector<uint64_t> one(6 * distance + 1);
    std::vector<uint64_t> other(6 * distance + 1);
    for (size_t k = 0; k < 4; ++k) {
      const bool outer = k == 0 || k == 3;
      one[positions[k]] = outer ? a : b;
      other[positions[k]] = outer ? b : a;
    }
    ASSERT_NE(ComputeDigest(std::as_bytes(std::span(one))), ComputeDigest(std::as_bytes(std::span(other))));
  }
}

TEST(Digest, AddsUpFromPartsInAnyOrderForAnyCutBetweenWords) {
  const Bytes bytes = RandomBytes(1003, 11);
  const Digest whole = ComputeDigest(bytes);
  std::mt19937_64 random(12);
  for (int round = 0; round < 500; ++round) {
    std::vector<size_t> cuts = {0, bytes.size()};
    for (uint64_t n = random() % 10; n > 0; --n) cuts.push_back(random() % (bytes.size() / 8) * 8);
    std::sort(cuts.begin(), cuts.end());
    std::vector<std::pair<size_t, size_t>> parts;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) parts.emplace_back(cuts[i], cuts[i + 1] - cuts[i]);
    std::shuffle(parts.begin(), parts.end(), random);

    DigestAccumulator accumulators[3];
    for (const auto& [offset, size] : parts) {
      accumulators[random() % 3].Add(static_cast<int64_t>(offset), std::span(bytes).subspan(offset, size));
    }
    accumulators[0].Merge(accumulators[1]);
    accumulators[0].Merge(accumulators[2]);
    ASSERT_EQ(accumulators[0].Finish(static_cast<int64_t>(bytes.size())), whole);
  }
}

TEST(Digest, CopiesExactlyAndDigestsTheSameAtAnyAlignmentOfMemory) {
  for (const size_t size : {0, 1, 7, 8, 63, 64, 65, 1000, 4099}) {
    for (size_t shift = 0; shift < 9; ++shift) {
      const Bytes source = RandomBytes(size + shift, size);
      Bytes destination(size + shift + 1, std::byte{0xAB});
      const auto from = std::span(source).subspan(shift);
      DigestAccumulator accumulator;

      CopyAndDigest(0, from, destination.data() + shift, accumulator);

      ASSERT_TRUE(std::equal(from.begin(), from.end(), destination.begin() + static_cast<ptrdiff_t>(shift)));
      ASSERT_EQ(destination.back(), std::byte{0xAB}) << "wrote past the end";
      ASSERT_EQ(accumulator.Finish(static_cast<int64_t>(size)), ComputeDigest(from));
    }
  }
}

TEST(DigestDeathTest, EndsTheProcessForAPartThatStartsInsideAWord) {
  DigestAccumulator accumulator;
  EXPECT_DEATH(accumulator.Add(4, Bytes(8)), "no multiple of 8");
}

TEST(Digest, PrintsThirtyTwoLowerCaseHexadecimalDigits) {
  Digest digest{};
  digest[0] = std::byte{0x0A};
  digest[15] = std::byte{0xFF};
  EXPECT_EQ(DigestHex(digest), "0a0000000000000000000000000000ff");
}

}  // namespace
}  // namespace weightbroker
