// A reader leaves the gate when a read has ended, and gives back all that it has, whatever happens.

#include "common/load/item_reader.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "common/base/error.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker {
namespace {

using testing::FaultyFileSystem;
using testing::IsOk;
using testing::StatusIs;
using testing::TemporaryFolder;

constexpr int64_t kItemBytes = 16384;
constexpr int kItems = 4;

class AlignedBuffers : public BufferSource {
 public:
  absl::StatusOr<std::span<std::byte>> Allocate(int64_t size_bytes) override {
    if (allocated == most) return MakeError(Reason::kMemoryExhausted, "no more buffers");
    ++allocated;
    return heap_.Allocate(size_bytes);
  }

  int allocated = 0;
  int most = 100;

 private:
  HeapBuffers heap_;
};

// Whether io_uring is there.
class ItemReaderTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    for (int64_t i = 0; i < kItems * kItemBytes; ++i) contents_.push_back(static_cast<char>(i * 7 + i / 251));
    testing::WriteFile(folder_.path() + "/x", contents_);
    FileIdentity identity;
    identity.name = "x";
    identity.stat = *files_.Stat(folder_.path() + "/x");
    auto file = ShardFile::Open(files_, folder_.path(), identity);
    ASSERT_THAT(file, IsOk());
    shard_files_.push_back(*std::move(file));
    for (int64_t i = 0; i < kItems; ++i) {
      ReadItem& item = items_.emplace_back();
      item.begin_bytes = i * kItemBytes;
      item.end_bytes = item.begin_bytes + kItemBytes;
    }
    if (shard_files_[0]->WayTo(0, 1) != ShardFile::Way::kDirect) GTEST_SKIP() << "no O_DIRECT here";
  }

  std::unique_ptr<ItemReader> MakeReader(ReadGate& gate) {
    std::unique_ptr<ReadQueue> queue;
    if (GetParam()) {
      auto made = files_.NewReadQueue(kItems);
      if (made.ok()) queue = *std::move(made);
    }
    return std::make_unique<ItemReader>(shard_files_, gate, buffers_, std::move(queue));
  }

  // What the reader had must all be free again: as many as are allocated can be taken.
  void ExpectAllBuffersFree() {
    EXPECT_THAT(buffers_.ReleaseAll(), IsOk());
    const int allocated = source_.allocated;
    for (int i = 0; i < allocated; ++i) EXPECT_THAT(pool_.Take(), IsOk());
    EXPECT_EQ(source_.allocated, allocated);
  }

  TemporaryFolder folder_;
  std::string contents_;
  FaultyFileSystem files_{RealFileSystem()};
  std::vector<std::unique_ptr<ShardFile>> shard_files_;
  std::vector<ReadItem> items_;
  AlignedBuffers source_;
  BufferPool pool_{source_, kItemBytes, kItems};
  ReadBuffers buffers_{pool_, /*in_flight=*/0, {}};
};

TEST_P(ItemReaderTest, LeavesTheGateAsEachReadEnds) {
  ReadGate gate(/*first=*/3, /*most=*/3);
  const auto reader = MakeReader(gate);
  for (size_t i = 0; i < 3; ++i) {
    gate.Enter();
    EXPECT_THAT(reader->Start(items_[i]), IsOk());
  }
  EXPECT_FALSE(gate.TryEnter());
  for (size_t i = 0; i < 3; ++i) {
    const auto read = reader->Finish();
    ASSERT_THAT(read, IsOk());
    EXPECT_TRUE(read->is_direct);
    EXPECT_EQ(read->item, &items_[i]);
    EXPECT_EQ(
        std::memcmp(read->bytes.data(), contents_.data() + items_[i].begin_bytes, static_cast<size_t>(kItemBytes)), 0);
    buffers_.Stored(read->buffer);
  }
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(gate.TryEnter());
  EXPECT_FALSE(gate.TryEnter());
}

TEST_P(ItemReaderTest, LeavesTheGateAtOnceWhereThePageCacheHasIt) {
  files_.PretendCached();
  ReadGate gate(/*first=*/1, /*most=*/1);
  gate.Enter();
  const auto reader = MakeReader(gate);
  EXPECT_THAT(reader->Start(items_[0]), IsOk());
  EXPECT_TRUE(gate.TryEnter());
  EXPECT_EQ(source_.allocated, 0) << "it is read when it is finished";
  const auto read = reader->Finish();
  ASSERT_THAT(read, IsOk());
  EXPECT_FALSE(read->is_direct);
}

TEST_P(ItemReaderTest, OneThatGoesGivesBackItsTurnsAndBuffers) {
  ReadGate gate(/*first=*/2, /*most=*/2);
  {
    const auto reader = MakeReader(gate);
    for (size_t i = 0; i < 2; ++i) {
      gate.Enter();
      EXPECT_THAT(reader->Start(items_[i]), IsOk());
    }
    EXPECT_EQ(source_.allocated, 2);
  }
  EXPECT_TRUE(gate.TryEnter());
  EXPECT_TRUE(gate.TryEnter());
  ExpectAllBuffersFree();
}

TEST_P(ItemReaderTest, ReportsThatThereIsNoBufferAndGivesBackWhatItHas) {
  source_.most = 1;
  ReadGate gate(/*first=*/2, /*most=*/2);
  {
    const auto reader = MakeReader(gate);
    gate.Enter();
    EXPECT_THAT(reader->Start(items_[0]), IsOk());
    gate.Enter();
    EXPECT_THAT(reader->Start(items_[1]), StatusIs(Reason::kMemoryExhausted, ::testing::HasSubstr("no more buffers")));
  }
  EXPECT_TRUE(gate.TryEnter());
  EXPECT_TRUE(gate.TryEnter());
  ExpectAllBuffersFree();
}

TEST_P(ItemReaderTest, ReportsAFailedReadAndGivesBackWhatItHas) {
  files_.FailRead("x", 1);
  files_.EndQueuedReadsWith(EIO);
  ReadGate gate(/*first=*/1, /*most=*/1);
  {
    const auto reader = MakeReader(gate);
    gate.Enter();
    EXPECT_THAT(reader->Start(items_[0]), IsOk());
    EXPECT_THAT(reader->Finish(), StatusIs(Reason::kSystemError, ::testing::HasSubstr("x")));
  }
  EXPECT_TRUE(gate.TryEnter());
  ExpectAllBuffersFree();
}

INSTANTIATE_TEST_SUITE_P(, ItemReaderTest, ::testing::Bool(),
                         [](const auto& way) { return way.param ? "ByIoUring" : "ByPread"; });

TEST(ReadGate, IsNarrowAsLongAsItLetsInFewerThanThereMayBe) {
  EXPECT_TRUE(ReadGate(1, 4).is_narrow());
  EXPECT_FALSE(ReadGate(4, 4).is_narrow());
}

}  // namespace
}  // namespace weightbroker
