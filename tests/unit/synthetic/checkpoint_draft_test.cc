#include "common/synthetic/checkpoint_draft.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <cstring>

#include "common/checkpoint/checkpoint.h"
#include "common/synthetic/contents.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::SizeIs;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::ReadFile;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::TemporaryFolder;

std::vector<TensorDraft> Tensors(size_t count) {
  std::vector<TensorDraft> tensors;
  for (size_t i = 0; i < count; ++i) tensors.push_back({"t" + std::to_string(i), "BF16", {8, 8}});
  return tensors;
}

CheckpointDraft DraftOf(const std::vector<TensorDraft>& tensors, int64_t shard_count) {
  CheckpointDraft draft;
  draft.config = {{"model_type", "synthetic"}};
  DivideIntoShards(tensors, shard_count, 1 << 30, &draft);
  return draft;
}

std::vector<std::byte> Contents(uint64_t seed, const std::string& name, const char* dtype, size_t size) {
  std::vector<std::byte> bytes(size);
  TensorContents(seed, name, *FindDtype(dtype)).Fill(0, bytes);
  return bytes;
}

TEST(DivideIntoShards, MakesAsManyAsAreAskedForEachWithATensor) {
  for (const int64_t count : {1, 2, 3, 7, 10}) {
    const CheckpointDraft draft = DraftOf(Tensors(10), count);
    ASSERT_THAT(draft.shards, SizeIs(count));
    for (const ShardDraft& shard : draft.shards) EXPECT_FALSE(shard.tensors.empty());
    EXPECT_EQ(draft.tensor_count(), 10);
  }
}

TEST(DivideIntoShards, MakesThemOfAboutEqualLength) {
  std::vector<int64_t> bytes;
  for (const ShardDraft& shard : DraftOf(Tensors(12), 4).shards) bytes.push_back(shard.data_bytes());
  EXPECT_THAT(bytes, ElementsAre(384, 384, 384, 384));
}

TEST(DivideIntoShards, BeginsAShardWhereTheLargestIsFull) {
  CheckpointDraft draft;
  DivideIntoShards(Tensors(5), 0, 300, &draft);  // of 128 bytes each
  ASSERT_THAT(draft.shards, SizeIs(3));
  EXPECT_THAT(draft.shards[0].tensors, SizeIs(2));
  EXPECT_TRUE(draft.has_index);
}

TEST(WriteCheckpoint, WritesWhatTheReaderReads) {
  const TemporaryFolder dir;
  ASSERT_THAT(WriteCheckpoint(DraftOf(Tensors(10), 3), dir / "model", {}), IsOk());

  const auto checkpoint = OpenCheckpoint(RealFileSystem(), dir / "model");

  ASSERT_THAT(checkpoint, IsOk());
  EXPECT_THAT(checkpoint->tensors, SizeIs(10));
  EXPECT_EQ(checkpoint->total_bytes, 1280);
}

TEST(WriteCheckpoint, WritesTheSameBytesForTheSameSeedOnly) {
  const TemporaryFolder dir;
  ASSERT_THAT(WriteCheckpoint(DraftOf(Tensors(2), 1), dir / "a", {.seed = 7}), IsOk());
  ASSERT_THAT(WriteCheckpoint(DraftOf(Tensors(2), 1), dir / "b", {.seed = 7}), IsOk());
  ASSERT_THAT(WriteCheckpoint(DraftOf(Tensors(2), 1), dir / "c", {.seed = 8}), IsOk());

  EXPECT_EQ(ReadFile(dir / "a/model.safetensors"), ReadFile(dir / "b/model.safetensors"));
  EXPECT_NE(ReadFile(dir / "a/model.safetensors"), ReadFile(dir / "c/model.safetensors"));
}

TEST(WriteCheckpoint, LeavesHolesInSparseFiles) {
  const TemporaryFolder dir;
  const CheckpointDraft draft = DraftOf({{"large", "F32", {1 << 20, 256}}}, 1);
  ASSERT_THAT(WriteCheckpoint(draft, dir / "model", {.sparse = true}), IsOk());

  struct stat file {};
  ASSERT_EQ(stat((dir / "model/model.safetensors").c_str(), &file), 0);
  EXPECT_GT(file.st_size, int64_t{1} << 30);
  EXPECT_LT(file.st_blocks * 512, 1 << 20);
  EXPECT_THAT(OpenCheckpoint(RealFileSystem(), dir / "model"), IsOk());
}

TEST(WriteCheckpoint, WritesTheStartOfEachTensorInSparseFilesIfItIsToldTo) {
  const TemporaryFolder dir;
  const CheckpointDraft draft = DraftOf({{"a", "U8", {100}}, {"b", "U8", {100}}}, 1);
  ASSERT_THAT(WriteCheckpoint(draft, dir / "whole", {}), IsOk());
  ASSERT_THAT(WriteCheckpoint(draft, dir / "holes", {.sparse = true, .sparse_head_bytes = 16}), IsOk());

  const std::string whole = ReadFile(dir / "whole/model.safetensors");
  const std::string holes = ReadFile(dir / "holes/model.safetensors");
  const auto data = static_cast<size_t>(HeaderBytes(draft.shards[0]));
  ASSERT_EQ(whole.size(), data + 200);
  ASSERT_EQ(holes.size(), data + 200);
  for (const size_t begin : {data, data + 100}) {
    EXPECT_EQ(holes.substr(begin, 16), whole.substr(begin, 16));
    EXPECT_EQ(holes.substr(begin + 16, 84), std::string(84, '\0'));
  }
}

TEST(WriteCheckpoint, RefusesAFolderThatHasSomethingInIt) {
  const TemporaryFolder dir;
  ASSERT_THAT(WriteCheckpoint(DraftOf(Tensors(1), 1), dir / "model", {}), IsOk());

  EXPECT_THAT(WriteCheckpoint(DraftOf(Tensors(1), 1), dir / "model", {}), StatusIs(Reason::kInvalidArgument));
}

TEST(TensorContents, GivesAnyPartAsTheWholeHasIt) {
  const TensorContents contents(3, "w", *FindDtype("BF16"));
  std::vector<std::byte> whole(100);
  std::vector<std::byte> part(50);
  contents.Fill(0, whole);
  contents.Fill(24, part);
  EXPECT_EQ(memcmp(whole.data() + 24, part.data(), part.size()), 0);
}

TEST(TensorContents, AreFiniteAndNeitherTinyNorHuge) {
  const std::vector<std::byte> bytes = Contents(1, "w", "F32", 4096);
  std::vector<float> values(bytes.size() / sizeof(float));
  memcpy(values.data(), bytes.data(), bytes.size());
  for (const float value : values) {
    EXPECT_TRUE(std::isfinite(value));
    EXPECT_GE(std::fabs(value), 1.0F / 256);
    EXPECT_LT(std::fabs(value), 2);
  }
}

TEST(TensorContents, HaveNoNanInFp8) {
  for (const std::byte byte : Contents(1, "w", "F8_E4M3", 4096)) EXPECT_NE(byte & std::byte{0x7F}, std::byte{0x7F});
}

TEST(TensorContents, ArePositiveInScales) {
  const std::vector<std::byte> bytes = Contents(1, "w_scale_inv", "F32", 4096);
  std::vector<float> values(bytes.size() / sizeof(float));
  memcpy(values.data(), bytes.data(), bytes.size());
  EXPECT_THAT(values, Each(::testing::Gt(0)));
}

}  // namespace
}  // namespace weightbroker
