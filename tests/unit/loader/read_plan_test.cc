#include "common/load/read_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/base/file.h"
#include "common/plan/region.h"

namespace weightbroker {
namespace {

constexpr int64_t kChunk = 2 * kDirectAlignmentBytes;

// A checkpoint and a node's plan of it, built by hand.
class Example {
 public:
  explicit Example(size_t shards = 1) { plan_.shards.resize(shards); }

  // A tensor of bytes.
  int32_t Source(int32_t file_index, int64_t offset_bytes, int64_t size_bytes) {
    return Matrix(file_index, offset_bytes, "U8", {size_bytes});
  }
  int32_t Matrix(int32_t file_index, int64_t offset_bytes, const std::string& dtype, std::vector<int64_t> shape) {
    const DtypeInfo* const info = FindDtype(dtype);
    const int64_t size_bytes = ElementCount(shape) * info->bits / 8;
    checkpoint_.tensors.push_back({"t", info, std::move(shape), file_index, offset_bytes, size_bytes});
    return static_cast<int32_t>(checkpoint_.tensors.size() - 1);
  }

  void Take(size_t shard, Transform transform, std::vector<Piece> pieces) {
    TensorPlacement& tensor = plan_.shards[shard].tensors.emplace_back();
    tensor.transform = transform;
    tensor.pieces = std::move(pieces);
  }
  void HasSlabs(size_t shard, size_t count) { plan_.shards[shard].slab_bytes.assign(count, 1); }
  void ClearSlab(size_t shard) { plan_.shards[shard].slab_bytes.front() = 0; }
  void PutInSlab(size_t shard, int32_t slab) { plan_.shards[shard].tensors.back().slab = slab; }
  void TakeAll(size_t shard, int32_t source) {
    const int64_t size = checkpoint_.tensors[static_cast<size_t>(source)].size_bytes;
    Take(shard, Transform::kCopy, {{.source = source, .run_elements = size}});
  }

  // Puts the tensor that was taken last at the end of its shard's slab.
  void Append(size_t shard) {
    TensorPlacement& tensor = plan_.shards[shard].tensors.back();
    for (const Piece& piece : tensor.pieces) tensor.size_bytes += piece.run_count * piece.run_elements;
    int64_t& end = plan_.shards[shard].slab_bytes.front();
    tensor.slab_offset_bytes = std::exchange(
        end, (end + tensor.size_bytes + kTensorAlignmentBytes - 1) / kTensorAlignmentBytes * kTensorAlignmentBytes);
  }

  ReadPlan Plan(int64_t chunk_bytes = kChunk, int64_t landing_bytes = 0) const {
    return ReadPlan(checkpoint_, plan_, chunk_bytes, landing_bytes);
  }
  const Checkpoint& checkpoint() const { return checkpoint_; }
  const NodePlan& plan() const { return plan_; }

 private:
  Checkpoint checkpoint_;
  NodePlan plan_;
};

int64_t RoundedLength(const ReadItem& item) {
  const int64_t begin = item.begin_bytes / kDirectAlignmentBytes * kDirectAlignmentBytes;
  return (item.end_bytes + kDirectAlignmentBytes - 1) / kDirectAlignmentBytes * kDirectAlignmentBytes - begin;
}

// Checks what the header promises of items, each of whose sources is wanted whole.
void ExpectCoversExactly(const Example& example, const ReadPlan& reads, int64_t chunk_bytes) {
  const auto& sources = example.checkpoint().tensors;
  std::vector<int64_t> next(sources.size(), 0);
  std::vector<ReadItem> items = reads.items();
  std::sort(items.begin(), items.end(), [](const ReadItem& a, const ReadItem& b) {
    return std::tie(a.file_index, a.begin_bytes) < std::tie(b.file_index, b.begin_bytes);
  });
  for (const ReadItem& item : items) {
    ASSERT_LE(RoundedLength(item), chunk_bytes);
    ASSERT_LE(RoundedLength(item), reads.buffer_bytes());
    ASSERT_FALSE(item.segments.empty());
    int64_t at = item.begin_bytes;
    for (const ReadSegment& segment : item.segments) {
      const auto index = static_cast<size_t>(segment.source);
      ASSERT_EQ(segment.file_offset_bytes, at) << "a gap";
      ASSERT_EQ(item.file_index, sources[index].file_index);
      ASSERT_EQ(segment.file_offset_bytes, sources[index].offset_bytes + next[index]);
      ASSERT_EQ(next[index] % kCutBytes, 0);
      ASSERT_GT(segment.size_bytes, 0);
      next[index] += segment.size_bytes;
      at += segment.size_bytes;
    }
    ASSERT_EQ(at, item.end_bytes);
  }
  for (size_t i = 0; i < next.size(); ++i) ASSERT_EQ(next[i], sources[i].size_bytes) << "source " << i;
}

// Where each element of each tensor of a shard comes from, by the pieces: (tensor, element) -> byte of a file.
using Origins = std::map<std::pair<int32_t, int64_t>, std::pair<int32_t, int64_t>>;

Origins OriginsByPieces(const Example& example, size_t shard) {
  Origins origins;
  const auto& tensors = example.plan().shards[shard].tensors;
  for (size_t t = 0; t < tensors.size(); ++t) {
    for (const Piece& piece : tensors[t].pieces) {
      const CheckpointTensor& source = example.checkpoint().tensors[static_cast<size_t>(piece.source)];
      for (int64_t run = 0; run < piece.run_count; ++run) {
        for (int64_t e = 0; e < piece.run_elements; ++e) {
          const int64_t from = piece.source_offset + run * piece.source_stride + e;
          const int64_t to = piece.offset + run * piece.stride + e * piece.element_stride;
          origins[{static_cast<int32_t>(t), to}] = {source.file_index,
                                                    source.offset_bytes + from * source.dtype->bits / 8};
        }
      }
    }
  }
  return origins;
}

Origins OriginsByTransfers(const ReadPlan& reads, size_t shard) {
  Origins origins;
  for (const ReadItem& item : reads.items()) {
    for (const Transfer& transfer : reads.TransfersOf(item, shard)) {
      for (int64_t run = 0; run < transfer.run_count; ++run) {
        for (int64_t e = 0; e < transfer.run_elements; ++e) {
          const int64_t from = item.begin_bytes + transfer.source_offset_bytes + run * transfer.source_stride_bytes +
                               e * transfer.source_dtype->bits / 8;
          const int64_t to = transfer.offset + run * transfer.stride + e * transfer.element_stride;
          EXPECT_GE(from, item.begin_bytes);
          EXPECT_LT(from, item.end_bytes);
          EXPECT_TRUE(origins.emplace(std::pair{transfer.tensor, to}, std::pair{item.file_index, from}).second)
              << "an element lands twice";
        }
      }
    }
  }
  return origins;
}

TEST(ReadPlan, ReadsNeighboursTogether) {
  Example example;
  example.TakeAll(0, example.Source(0, 100, 50));
  example.TakeAll(0, example.Source(0, 150, 60));

  const auto reads = example.Plan();

  ASSERT_EQ(reads.items().size(), 1u);
  EXPECT_EQ(reads.items()[0].begin_bytes, 100);
  EXPECT_EQ(reads.items()[0].end_bytes, 210);
}

TEST(ReadPlan, NeverReadsAcrossFilesOrGaps) {
  Example example;
  example.TakeAll(0, example.Source(0, 100, 50));
  example.TakeAll(0, example.Source(0, 160, 60));
  example.TakeAll(0, example.Source(1, 220, 60));
  const auto reads = example.Plan();
  EXPECT_EQ(reads.items().size(), 3u);
  ExpectCoversExactly(example, reads, kChunk);
}

TEST(ReadPlan, CutsAlignedTensorsAtBlocksSoThatNoneIsReadTwice) {
  Example example;
  example.TakeAll(0, example.Source(0, 4096 + 128, 100'000));
  const auto reads = example.Plan();
  for (size_t i = 1; i < reads.items().size(); ++i) {
    EXPECT_EQ(reads.items()[i].begin_bytes % kDirectAlignmentBytes, 0);
  }
  ExpectCoversExactly(example, reads, kChunk);
}

TEST(ReadPlan, CutsTensorsAtAnyOffsetBetweenTheirWords) {
  for (int64_t offset = 1; offset < kCutBytes; ++offset) {
    Example example;
    example.TakeAll(0, example.Source(0, 4096 + offset, 100'001));
    ExpectCoversExactly(example, example.Plan(), kChunk);
  }
}

TEST(ReadPlan, LeavesOutWhatNobodyWants) {
  Example example;
  example.Source(0, 100, 50);
  const int32_t empty = example.Source(0, 150, 0);
  example.TakeAll(0, empty);
  EXPECT_TRUE(example.Plan().items().empty());
}

TEST(ReadPlan, ReadsWhatSeveralShardsWantOnce) {
  Example example(3);
  const int32_t source = example.Source(0, 4096, 50'000);
  for (size_t shard = 0; shard < 3; ++shard) example.TakeAll(shard, source);
  ExpectCoversExactly(example, example.Plan(), kChunk);
}

TEST(ReadPlan, CoversAnyLayoutExactly) {
  std::mt19937_64 random(4);
  for (int round = 0; round < 300; ++round) {
    Example example;
    for (int32_t file = 0; file < 3; ++file) {
      int64_t at = 8 + static_cast<int64_t>(random() % 10'000);
      for (uint64_t n = random() % 30; n > 0; --n) {
        const auto size = static_cast<int64_t>(random() % (random() % 4 == 0 ? 60'000 : 40));
        example.TakeAll(0, example.Source(file, at, size));
        at += size;
      }
    }
    const int64_t chunk = kDirectAlignmentBytes * static_cast<int64_t>(2 + random() % 4);
    ASSERT_NO_FATAL_FAILURE(ExpectCoversExactly(example, example.Plan(chunk), chunk)) << "round " << round;
  }
}

TEST(ReadPlan, CutsPiecesOfAnyShapeIntoTransfersOfTheSameElements) {
  std::mt19937_64 random(5);
  const auto below = [&](int64_t limit) { return static_cast<int64_t>(random() % static_cast<uint64_t>(limit)); };
  for (int round = 0; round < 200; ++round) {
    Example example(2);
    const int64_t rows = 1 + below(40);
    const int64_t columns = 1 + below(900);
    const int32_t source = example.Matrix(0, 1000 + below(100), round % 2 == 0 ? "BF16" : "F32", {rows, columns});
    for (size_t shard = 0; shard < 2; ++shard) {
      const int64_t begin = below(columns);
      const int64_t length = 1 + below(columns - begin);
      const int64_t first = below(rows);
      example.Take(shard, Transform::kCopy,
                   {{.source = source,
                     .run_elements = length,
                     .run_count = rows - first,
                     .source_offset = first * columns + begin,
                     .source_stride = columns,
                     .offset = 7,
                     .stride = length + 3}});
      example.Take(shard, Transform::kTranspose,
                   {{.source = source,
                     .run_elements = length,
                     .run_count = rows,
                     .source_offset = begin,
                     .source_stride = columns,
                     .offset = 0,
                     .stride = 1,
                     .element_stride = rows}});
    }
    const auto reads = example.Plan();
    for (size_t shard = 0; shard < 2; ++shard) {
      ASSERT_EQ(OriginsByTransfers(reads, shard), OriginsByPieces(example, shard)) << "round " << round;
    }
  }
}

TEST(ReadPlan, GivesRowsThatAreQuantizedByWholeRowsOfBlocksHoweverLarge) {
  Example example(2);
  const int32_t source = example.Matrix(0, 5000, "F32", {300, 64});  // 32 KiB for a row of blocks
  example.Source(0, 5000 + 300 * 64 * 4, 100);
  for (size_t shard = 0; shard < 2; ++shard) {
    example.Take(shard, Transform::kQuantizeFp8Block,
                 {{.source = source,
                   .run_elements = 32,
                   .run_count = 300,
                   .source_offset = 32 * static_cast<int64_t>(shard),
                   .source_stride = 64,
                   .offset = 0,
                   .stride = 32,
                   .scale_offset = 5,
                   .scale_stride = 1}});
  }
  const auto reads = example.Plan();
  EXPECT_EQ(reads.items().size(), 3u);
  EXPECT_GE(reads.buffer_bytes(), 128 * 64 * 4);
  for (size_t shard = 0; shard < 2; ++shard) {
    EXPECT_EQ(OriginsByTransfers(reads, shard), OriginsByPieces(example, shard));
    std::vector<int64_t> rows;
    std::vector<int64_t> scales;
    for (const ReadItem& item : reads.items()) {
      for (const Transfer& transfer : reads.TransfersOf(item, shard)) {
        rows.push_back(transfer.run_count);
        scales.push_back(transfer.scale_offset);
      }
    }
    EXPECT_THAT(rows, ::testing::ElementsAre(128, 128, 44));
    EXPECT_THAT(scales, ::testing::ElementsAre(5, 6, 7));
  }
}

// Which parts of `landing_bytes` of a shard's slab each item writes to.
std::map<int64_t, int> ItemsOfEachLanding(const Example& example, const ReadPlan& reads, int64_t landing_bytes) {
  std::map<int64_t, int> items;
  for (const ReadItem& item : reads.items()) {
    std::set<int64_t> touched;
    for (const Transfer& transfer : reads.TransfersOf(item, 0)) {
      const TensorPlacement& tensor = example.plan().shards[0].tensors[static_cast<size_t>(transfer.tensor)];
      const int64_t begin = tensor.slab_offset_bytes + transfer.offset;
      const int64_t end = begin + transfer.run_elements;
      for (int64_t i = begin / landing_bytes; i <= (end - 1) / landing_bytes; ++i) touched.insert(i);
    }
    for (const int64_t landing : touched) ++items[landing];
  }
  return items;
}

TEST(ReadPlan, FillsEachPartOfASlabByOneReadIfAskedTo) {
  std::mt19937_64 random(6);
  const auto below = [&](int64_t limit) { return static_cast<int64_t>(random() % static_cast<uint64_t>(limit)); };
  for (int round = 0; round < 300; ++round) {
    Example example;
    example.HasSlabs(0, 1);
    example.ClearSlab(0);
    int64_t at = 8 + 8 * below(10'000);
    for (int64_t n = 1 + below(30); n > 0; --n) {
      const int64_t size = 1 + below(below(4) == 0 ? 60'000 : 400);
      example.TakeAll(0, example.Source(0, at, size));
      example.Append(0);
      at += size;
    }

    const auto reads = example.Plan(kChunk, kChunk);

    ASSERT_NO_FATAL_FAILURE(ExpectCoversExactly(example, reads, kChunk + kDirectAlignmentBytes)) << "round " << round;
    for (const ReadItem& item : reads.items()) ASSERT_LE(item.end_bytes - item.begin_bytes, kChunk);
    for (const auto& [landing, items] : ItemsOfEachLanding(example, reads, kChunk)) {
      ASSERT_EQ(items, 1) << "part " << landing << ", round " << round;
    }
  }
}

// The second half's place, which lies behind what the first items may read, is no place to end them.
TEST(ReadPlan, FillsPartsOfTheSlabsOfSeveralShardsEachAsFarAsItCan) {
  Example example(2);
  const int64_t half = 8 * kChunk + 4096;
  const int32_t source = example.Source(0, 4096 + 128, 2 * half);
  for (size_t shard = 0; shard < 2; ++shard) {
    example.HasSlabs(shard, 1);
    const int64_t from = static_cast<int64_t>(shard) * half;
    example.Take(shard, Transform::kCopy, {{.source = source, .run_elements = half, .source_offset = from}});
  }
  const auto reads = example.Plan(kChunk, kChunk);
  ExpectCoversExactly(example, reads, kChunk + kDirectAlignmentBytes);
  for (const ReadItem& item : reads.items()) EXPECT_LE(item.end_bytes - item.begin_bytes, kChunk);
  EXPECT_EQ(reads.items().size(), 18U);
}

TEST(ReadPlan, ReadsWhatIsNotCopiedAsItIsInWholeChunksWhereverItLands) {
  for (const Transform transform : {Transform::kConvert, Transform::kTranspose}) {
    Example example;
    example.HasSlabs(0, 1);
    const int32_t source = example.Matrix(0, 4096 + 128, "F32", {100'000});
    example.Take(0, transform, {{.source = source, .run_elements = 100'000}});
    const auto reads = example.Plan(kChunk, kChunk);
    ExpectCoversExactly(example, reads, kChunk + kDirectAlignmentBytes);
    EXPECT_EQ(reads.items().front().end_bytes, 4096 + 128 + kChunk);
  }
}

// How many of the first reads, for each length of them, go to shard 0.
std::vector<int> ReadsOfFirstShard(const ReadPlan& reads) {
  std::vector<int> counts = {0};
  for (const ReadItem& item : reads.items()) {
    counts.push_back(counts.back() + (reads.TransfersOf(item, 0).empty() ? 0 : 1));
  }
  return counts;
}

TEST(ReadPlan, LetsTheHalvesOfAMatrixTakeTurns) {
  Example example(2);
  const int64_t half = 32 * kChunk;
  const int32_t source = example.Source(0, 4096, 2 * half);
  for (size_t shard = 0; shard < 2; ++shard) {
    const int64_t from = static_cast<int64_t>(shard) * half;
    example.Take(shard, Transform::kCopy, {{.source = source, .run_elements = half, .source_offset = from}});
    example.HasSlabs(shard, 1);
  }
  const auto reads = example.Plan();
  ExpectCoversExactly(example, reads, kChunk);
  const std::vector<int> counts = ReadsOfFirstShard(reads);
  for (size_t i = 0; i < counts.size(); ++i) EXPECT_NEAR(counts[i], static_cast<double>(i) / 2, 1) << i;
}

TEST(ReadPlan, LetsSlabsTakeTurnsByTheirLengthEachInFileOrder) {
  Example example;
  example.HasSlabs(0, 3);
  int64_t at = 4096;
  for (int32_t slab = 0; slab < 3; ++slab) {
    const int64_t size_bytes = (slab + 1) * 20 * kChunk;
    example.TakeAll(0, example.Source(slab == 2 ? 1 : 0, slab == 2 ? 4096 : at, size_bytes));
    example.PutInSlab(0, slab);
    at += size_bytes;
  }
  const auto reads = example.Plan();
  ExpectCoversExactly(example, reads, kChunk);
  ASSERT_EQ(reads.items().size(), 120U);
  std::vector<int64_t> seen(3);
  std::vector<int64_t> last(3);
  for (size_t i = 0; i < reads.items().size(); ++i) {
    const ReadItem& item = reads.items()[i];
    const auto slab = static_cast<size_t>(item.segments.front().source);
    EXPECT_GT(item.begin_bytes, std::exchange(last[slab], item.begin_bytes));
    ++seen[slab];
    for (size_t each = 0; each < 3; ++each) {
      EXPECT_NEAR(seen[each], static_cast<double>((i + 1) * (each + 1)) / 6, 1.5) << "slab " << each << " after " << i;
    }
  }
}

TEST(ReadPlan, ReadsThroughSmallGapsAndSkipsLargeOnes) {
  for (const bool is_large : {false, true}) {
    Example example;
    const int64_t row = is_large ? 200'000 : 20'000;
    const int32_t source = example.Matrix(0, 4096, "U8", {4, row});
    example.Take(0, Transform::kCopy,
                 {{.source = source, .run_elements = 1000, .run_count = 4, .source_stride = row, .stride = 1000}});
    const auto reads = example.Plan();
    int64_t bytes = 0;
    for (const ReadItem& item : reads.items()) bytes += item.end_bytes - item.begin_bytes;
    EXPECT_EQ(bytes, is_large ? 4000 : 3 * row + 1000);
    EXPECT_EQ(OriginsByTransfers(reads, 0), OriginsByPieces(example, 0));
  }
}

}  // namespace
}  // namespace weightbroker
