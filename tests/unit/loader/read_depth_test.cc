#include "common/load/read_depth.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "common/load/read_gate.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using ::testing::Ge;
using ::testing::Le;

constexpr int64_t kReadBytes = 4 << 20;

// Storage that serves so many bytes a nanosecond when so many reads are under way.
using Storage = std::function<double(int reads)>;

// One load of 16 GiB; `noise` is how far a read's time may be off, up or down.
ReadDepth LoadFrom(const Storage& storage, int first, int most, double noise = 0, uint32_t seed = 1) {
  ReadDepth depth(first, most);
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> factor(1 - noise, 1 + noise);
  double now_ns = 0;
  for (int i = 0; i < 4096; ++i) {
    now_ns += kReadBytes / storage(depth.limit()) * factor(random);
    depth.Completed(kReadBytes, static_cast<int64_t>(now_ns));
  }
  return depth;
}

TEST(ReadDepth, GrowsAsLongAsMoreReadsBringMore) {
  const auto array = [](int reads) { return 1.5 * std::min(reads, 24); };
  EXPECT_THAT(LoadFrom(array, 2, 64).settled(), AllOf(Ge(16), Le(32)));
}

TEST(ReadDepth, StaysBelowWhatMakesStorageSlower) {
  const auto virtual_disk = [](int reads) { return reads <= 2 ? 2.5 : 1.85; };
  EXPECT_THAT(LoadFrom(virtual_disk, 2, 16).settled(), Le(2));
}

TEST(ReadDepth, ComesDownAgainWhereStorageComesToLikeFewer) {
  double left_bytes = int64_t{8} << 30;
  const auto shared = [&](int reads) {
    left_bytes -= kReadBytes;
    return left_bytes > 0 ? 1.5 * std::min(reads, 8) : reads <= 2 ? 2.5 : 2.5 / reads;
  };
  EXPECT_EQ(LoadFrom(shared, 2, 16).settled(), 2);
}

TEST(ReadDepth, StaysFewWhereItMakesNoDifference) {
  EXPECT_THAT(LoadFrom([](int) { return 3.0; }, 2, 16).settled(), Le(2));
}

TEST(ReadDepth, IsNeverBelowTheFirstNorAboveTheMost) {
  EXPECT_EQ(LoadFrom([](int reads) { return 1.0 / reads; }, 1, 16).settled(), 1);
  EXPECT_EQ(LoadFrom([](int reads) { return 1.0 / reads; }, 4, 16).settled(), 4);
  EXPECT_EQ(LoadFrom([](int reads) { return 1.0 * reads; }, 3, 20).settled(), 20);
  EXPECT_EQ(LoadFrom([](int) { return 1.0; }, 1, 1).settled(), 1);
}

TEST(ReadDepth, FindsItsWayThroughNoise) {
  const auto array = [](int reads) { return 1.5 * std::min(reads, 16); };
  const auto virtual_disk = [](int reads) { return reads <= 2 ? 2.5 : 1.5; };
  for (uint32_t seed = 1; seed <= 50; ++seed) {
    EXPECT_THAT(LoadFrom(array, 2, 64, 0.5, seed).settled(), Ge(8)) << "seed " << seed;
    EXPECT_THAT(LoadFrom(virtual_disk, 2, 64, 0.5, seed).settled(), Le(4)) << "seed " << seed;
  }
}

// As a virtual disk was seen to be: the time of a window off by a twelfth, and more reads worse.
TEST(ReadDepth, NoiseDoesNotMakeMoreReadsOfOnesThatAreEnough) {
  const auto virtual_disk = [](int reads) { return reads <= 4 ? 2.5 : 2.3; };
  int64_t raised = 0;
  for (uint32_t seed = 1; seed <= 200; ++seed) raised += LoadFrom(virtual_disk, 4, 48, 0.8, seed).settled() > 4;
  EXPECT_LE(raised, 10) << "of 200 loads";
}

TEST(ReadDepth, OneBadWindowNowAndThenIsNoChangeOfTheStorage) {
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    int64_t reads_done = 0;
    const auto array = [&](int reads) {
      const bool is_bad = reads_done++ / 64 % 33 == 7;
      return (is_bad ? 0.4 : 1.0) * 1.5 * std::min(reads, 48);
    };
    EXPECT_THAT(LoadFrom(array, 4, 48, 0.1, seed).settled(), Ge(24)) << "seed " << seed;
  }
}

TEST(ReadDepth, TriesLessOftenWhatBringsNothing) {
  int64_t tries = 0;
  const auto virtual_disk = [&](int reads) {
    tries += reads > 4;
    return 2.5;
  };
  LoadFrom(virtual_disk, 4, 48);
  EXPECT_LE(tries, 4096 / 10) << "reads of 4096 that went with more under way than is enough";
  EXPECT_GT(tries, 0);
}

TEST(ReadDepth, GivesUpATryWhenStorageHalves) {
  int64_t reads_done = 0;
  const auto shared = [&](int reads) { return ++reads_done < 100 ? 1.5 * reads : reads <= 4 ? 0.5 : 0.1; };
  EXPECT_LE(LoadFrom(shared, 4, 48).settled(), 4);
}

TEST(ReadDepth, SurvivesAClockThatStandsStill) {
  ReadDepth depth(2, 16);
  for (int i = 0; i < 1000; ++i) depth.Completed(kReadBytes, 7);
  EXPECT_EQ(depth.limit(), 2);
}

TEST(ReadGate, LetsInAsManyAsItsLimitAndTheNextWhenOneLeaves) {
  ReadGate gate(2, 2);
  EXPECT_TRUE(gate.TryEnter());
  EXPECT_TRUE(gate.TryEnter());
  EXPECT_FALSE(gate.TryEnter());
  std::thread waiter([&] { gate.Enter(); });
  gate.Leave(0);
  waiter.join();
  EXPECT_FALSE(gate.TryEnter());
}

TEST(ReadGate, NobodyWaitsForEver) {
  ReadGate gate(1, 8);
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int read = 0; read < 2000; ++read) {
        gate.Enter();
        gate.Leave(4096);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(gate.settled(), AllOf(Ge(1), Le(8)));
}

}  // namespace
}  // namespace weightbroker
