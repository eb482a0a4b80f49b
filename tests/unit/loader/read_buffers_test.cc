// As few read buffers as can be are used, those used last first, and none while a destination needs it.

#include "common/load/read_buffers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "common/base/error.h"
#include "common/base/file.h"
#include "common/memory/host_slab.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::IsOk;

constexpr int64_t kBufferBytes = 4096;

class CountingSource : public BufferSource {
 public:
  absl::StatusOr<std::span<std::byte>> Allocate(int64_t size_bytes) override {
    if (fails) return MakeError(Reason::kMemoryExhausted, "no more");
    buffers.emplace_back(static_cast<size_t>(size_bytes));
    return std::span(buffers.back());
  }

  std::deque<std::vector<std::byte>> buffers;
  bool fails = false;
};

// Remembers what was released.
class RecordingDestination : public Destination {
 public:
  absl::Status Store(std::span<const std::byte>, std::span<const Transfer>) override { return absl::OkStatus(); }
  absl::Status Release(std::span<const std::byte> chunk) override {
    released.push_back(chunk.data());
    return status;
  }
  absl::StatusOr<std::vector<Digest>> Finish() override { return std::vector<Digest>(); }

  std::vector<const std::byte*> released;
  absl::Status status;
};

TEST(HeapBuffers, LieOneBehindTheOtherSoThatShortOnesAreOnHugePagesToo) {
  constexpr int64_t kSizeBytes = kHugePageBytes / 2 + kDirectAlignmentBytes;
  HeapBuffers buffers;
  const auto first = buffers.Allocate(kSizeBytes);
  ASSERT_THAT(first, IsOk());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first->data()) % kHugePageBytes, 0u);
  for (int i = 1; i < 10; ++i) {
    const auto next = buffers.Allocate(kSizeBytes);
    ASSERT_THAT(next, IsOk());
    EXPECT_EQ(next->data(), first->data() + i * kSizeBytes);
  }
}

TEST(HeapBuffers, AreForReadingPastThePageCacheWhateverTheirNumber) {
  HeapBuffers buffers;
  std::set<std::byte*> starts;
  for (const int64_t size_bytes : {3 * kDirectAlignmentBytes, 5 * kHugePageBytes, 11 * kHugePageBytes}) {
    for (int i = 0; i < 20; ++i) {
      const auto buffer = buffers.Allocate(size_bytes);
      ASSERT_THAT(buffer, IsOk());
      EXPECT_EQ(static_cast<int64_t>(buffer->size()), size_bytes);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % kDirectAlignmentBytes, 0u);
      EXPECT_TRUE(starts.insert(buffer->data()).second);
      buffer->back() = std::byte{1};
    }
  }
}

class ReadBuffersTest : public ::testing::Test {
 protected:
  ReadBuffersTest() {
    auto destination = std::make_unique<RecordingDestination>();
    destination_ = destination.get();
    destinations_.push_back(std::move(destination));
  }

  CountingSource source_;
  RecordingDestination* destination_ = nullptr;
  std::vector<std::unique_ptr<Destination>> destinations_;
};

TEST_F(ReadBuffersTest, ThePoolGivesTheOneUsedLast) {
  BufferPool pool(source_, kBufferBytes, 3);
  const auto first = *pool.Take();
  const auto second = *pool.Take();
  EXPECT_NE(first.data(), second.data());
  EXPECT_EQ(first.size(), static_cast<size_t>(kBufferBytes));
  pool.Give(first);
  pool.Give(second);
  EXPECT_EQ(pool.Take()->data(), second.data());
  EXPECT_EQ(pool.Take()->data(), first.data());
  EXPECT_EQ(source_.buffers.size(), 2u) << "none is allocated while one is free";
}

TEST_F(ReadBuffersTest, ThePoolHasNoMoreThanItWasToldOf) {
  BufferPool pool(source_, kBufferBytes, 1);
  ASSERT_THAT(pool.Take(), IsOk());
  EXPECT_THAT(pool.Take().status().message(), HasSubstr("all of the 1 read buffers"));
}

TEST_F(ReadBuffersTest, WhereStoringIsDoneAtOnceTheSameBufferIsTakenAgain) {
  BufferPool pool(source_, kBufferBytes, 8);
  ReadBuffers buffers(pool, /*in_flight=*/0, destinations_);
  const auto first = *buffers.Take();
  for (int i = 0; i < 5; ++i) {
    buffers.Stored(first);
    EXPECT_EQ(buffers.Take()->data(), first.data());
  }
  EXPECT_EQ(source_.buffers.size(), 1u);
}

TEST_F(ReadBuffersTest, SoManyMayBeNeededYetWhenTheNextIsTaken) {
  BufferPool pool(source_, kBufferBytes, 2);
  ReadBuffers buffers(pool, /*in_flight=*/1, destinations_);
  const auto first = *buffers.Take();
  buffers.Stored(first);
  const auto second = *buffers.Take();
  EXPECT_NE(second.data(), first.data());
  EXPECT_THAT(destination_->released, ElementsAre());
  buffers.Stored(second);
  EXPECT_EQ(buffers.Take()->data(), first.data()) << "which was stored first";
  EXPECT_THAT(destination_->released, ElementsAre(first.data()));
  EXPECT_THAT(buffers.ReleaseAll(), IsOk());
  EXPECT_THAT(destination_->released, ElementsAre(first.data(), second.data()));
}

TEST_F(ReadBuffersTest, WhatWasReleasedOrNotUsedIsFreeForOtherThreads) {
  BufferPool pool(source_, kBufferBytes, 2);
  ReadBuffers some(pool, /*in_flight=*/1, destinations_);
  ReadBuffers others(pool, /*in_flight=*/1, destinations_);
  const auto first = *some.Take();
  some.Stored(first);
  const auto second = *some.Take();
  some.Unused(second);
  EXPECT_THAT(some.ReleaseAll(), IsOk());
  EXPECT_EQ(others.Take()->data(), first.data());
  EXPECT_EQ(others.Take()->data(), second.data());
}

TEST_F(ReadBuffersTest, ABufferWhoseReleaseHasFailedIsNotUsedAgain) {
  BufferPool pool(source_, kBufferBytes, 2);
  ReadBuffers buffers(pool, /*in_flight=*/0, destinations_);
  const auto first = *buffers.Take();
  buffers.Stored(first);
  destination_->status = MakeError(Reason::kCudaError, "gone");
  EXPECT_THAT(buffers.Take(), testing::StatusIs(Reason::kCudaError, HasSubstr("gone")));
  EXPECT_NE(pool.Take()->data(), first.data());
}

TEST_F(ReadBuffersTest, AnErrorOfTheSourceIsReported) {
  source_.fails = true;
  BufferPool pool(source_, kBufferBytes, 2);
  ReadBuffers buffers(pool, /*in_flight=*/0, destinations_);
  EXPECT_THAT(buffers.Take(), testing::StatusIs(Reason::kMemoryExhausted, HasSubstr("no more")));
}

}  // namespace
}  // namespace weightbroker
