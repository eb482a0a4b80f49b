#include "common/load/read_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "common/base/file.h"
#include "common/memory/digest.h"

namespace weightbroker {
namespace {

constexpr int64_t kChunk = 2 * kDirectAlignmentBytes;

TensorPlacement Placement(int32_t file_index, int64_t file_offset_bytes, int64_t size_bytes) {
  TensorPlacement placement;
  placement.file_index = file_index;
  placement.file_offset_bytes = file_offset_bytes;
  placement.size_bytes = size_bytes;
  return placement;
}

int64_t RoundedLength(const ReadItem& item) {
  const int64_t begin = item.begin_bytes / kDirectAlignmentBytes * kDirectAlignmentBytes;
  return (item.end_bytes + kDirectAlignmentBytes - 1) / kDirectAlignmentBytes * kDirectAlignmentBytes - begin;
}

// Checks everything that the header promises.
void ExpectCoversExactly(const ShardPlan& plan, const std::vector<ReadItem>& items, int64_t chunk_bytes) {
  std::vector<int64_t> next(plan.tensors.size(), 0);
  for (const ReadItem& item : items) {
    ASSERT_LE(RoundedLength(item), chunk_bytes);
    ASSERT_FALSE(item.segments.empty());
    int64_t at = item.begin_bytes;
    for (const ReadSegment& segment : item.segments) {
      const auto index = static_cast<size_t>(segment.tensor);
      const TensorPlacement& tensor = plan.tensors[index];
      ASSERT_EQ(segment.file_offset_bytes, at) << "a gap";
      ASSERT_EQ(item.file_index, tensor.file_index);
      ASSERT_EQ(segment.tensor_offset_bytes, next[index]);
      ASSERT_EQ(segment.tensor_offset_bytes % kDigestWordBytes, 0);
      ASSERT_EQ(segment.file_offset_bytes, tensor.file_offset_bytes + segment.tensor_offset_bytes);
      ASSERT_GT(segment.size_bytes, 0);
      next[index] += segment.size_bytes;
      at += segment.size_bytes;
    }
    ASSERT_EQ(at, item.end_bytes);
  }
  for (size_t i = 0; i < next.size(); ++i) {
    ASSERT_EQ(next[i], plan.tensors[i].alias_of.empty() ? plan.tensors[i].size_bytes : 0) << "tensor " << i;
  }
}

TEST(ReadPlan, ReadsNeighboursTogether) {
  ShardPlan plan;
  plan.tensors = {Placement(0, 100, 50), Placement(0, 150, 60)};

  const auto items = PlanReads(plan, kChunk);

  ASSERT_EQ(items.size(), 1u);
  EXPECT_EQ(items[0].begin_bytes, 100);
  EXPECT_EQ(items[0].end_bytes, 210);
}

TEST(ReadPlan, NeverReadsAcrossFilesOrGaps) {
  ShardPlan plan;
  plan.tensors = {Placement(0, 100, 50), Placement(0, 160, 60), Placement(1, 220, 60)};
  const auto items = PlanReads(plan, kChunk);
  EXPECT_EQ(items.size(), 3u);
  ExpectCoversExactly(plan, items, kChunk);
}

TEST(ReadPlan, CutsAlignedTensorsAtBlocksSoThatNoneIsReadTwice) {
  ShardPlan plan;
  plan.tensors = {Placement(0, 104, 100'000)};
  const auto items = PlanReads(plan, kChunk);
  for (size_t i = 1; i < items.size(); ++i) EXPECT_EQ(items[i].begin_bytes % kDirectAlignmentBytes, 0);
  ExpectCoversExactly(plan, items, kChunk);
}

TEST(ReadPlan, CutsTensorsAtOddOffsetsBetweenTheirWords) {
  for (int64_t offset = 1; offset < 8; ++offset) {
    ShardPlan plan;
    plan.tensors = {Placement(0, 4096 + offset, 100'001)};
    ExpectCoversExactly(plan, PlanReads(plan, kChunk), kChunk);
  }
}

TEST(ReadPlan, LeavesOutAliasesAndEmptyTensors) {
  ShardPlan plan;
  plan.tensors = {Placement(0, 100, 50), Placement(0, 100, 50), Placement(0, 150, 0)};
  plan.tensors[1].alias_of = "x";
  ExpectCoversExactly(plan, PlanReads(plan, kChunk), kChunk);
  plan.tensors = {Placement(0, 100, 0)};
  EXPECT_TRUE(PlanReads(plan, kChunk).empty());
}

TEST(ReadPlan, CoversAnyLayoutExactly) {
  std::mt19937_64 random(4);
  for (int round = 0; round < 300; ++round) {
    ShardPlan plan;
    for (int32_t file = 0; file < 3; ++file) {
      int64_t at = 8 + static_cast<int64_t>(random() % 10'000);
      for (uint64_t n = random() % 30; n > 0; --n) {
        const auto size = static_cast<int64_t>(random() % (random() % 4 == 0 ? 60'000 : 40));
        plan.tensors.push_back(Placement(file, at, size));
        at += size;
      }
    }
    std::shuffle(plan.tensors.begin(), plan.tensors.end(), random);
    const int64_t chunk = kDirectAlignmentBytes * static_cast<int64_t>(2 + random() % 4);
    ASSERT_NO_FATAL_FAILURE(ExpectCoversExactly(plan, PlanReads(plan, chunk), chunk)) << "round " << round;
  }
}

}  // namespace
}  // namespace weightbroker
