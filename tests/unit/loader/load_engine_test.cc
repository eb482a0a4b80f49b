#include "common/load/load_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "common/base/error.h"
#include "common/load/host_destination.h"
#include "common/plan/architecture.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/thread_limit.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using ::weightbroker::testing::CheckpointBuilder;
using ::weightbroker::testing::FaultyFileSystem;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::ReadFile;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::TemporaryFolder;
using ::weightbroker::testing::TensorBytes;
using ::weightbroker::testing::ThreadLimit;
using ::weightbroker::testing::WriteFile;

constexpr char kShard[] = "model.safetensors";

// Tensors of every awkward kind: U8 ones put those after them at odd offsets.
CheckpointBuilder AwkwardTensors() {
  CheckpointBuilder builder;
  builder.Tensor("scalar", "F32", {});
  builder.Tensor("odd", "U8", {3});
  builder.Tensor("after_odd", "BF16", {5000});
  builder.Tensor("empty", "BF16", {0, 7});
  builder.Tensor("large", "F32", {123, 457});
  builder.Tensor("odd_again", "U8", {4097});
  builder.Tensor("last", "U8", {70'001});
  for (int i = 0; i < 200; ++i) builder.Tensor("small." + std::to_string(i), "BF16", {i % 7 + 1});
  return builder;
}

// A checkpoint on disk, planned and ready to be loaded, by each way of reading.
class LoadEngineTest : public ::testing::TestWithParam<ReadMethod> {
 protected:
  void Prepare(const CheckpointBuilder& builder) {
    builder.Write(folder_.path());
    identity_ = *ReadCheckpointIdentity(RealFileSystem(), folder_.path());
    checkpoint_ = *OpenCheckpoint(RealFileSystem(), folder_.path());
    Plan();
    slabs_.clear();
    slabs_.push_back(*HostSlab::Create(shard().slab_bytes[0]));
  }

  void Plan() {
    plan_ = *PlanNode({.checkpoint = checkpoint_,
                       .spec = *CompleteSpec({}),
                       .quantization = {},
                       .architectures = ArchitectureSet::Embedded(),
                       .ranks = {0}});
  }

  const ShardPlan& shard() const { return plan_.shards[0]; }

  absl::StatusOr<std::vector<Digest>> Load(
      FileSystem& file_system, LoadOptions options = {.chunk_bytes = 8192}, FillMethod method = FillMethod::kBest,
      const LoadProgressCallback& progress = [](int64_t) { return absl::OkStatus(); }) {
    options.read_method = GetParam();
    options.report = &report_;
    std::vector<std::unique_ptr<Destination>> destinations;
    destinations.push_back(MakeHostDestination(shard(), slabs_, method));
    auto digests = LoadNode({file_system, checkpoint_, identity_, plan_}, destinations, options, progress);
    if (!digests.ok()) return digests.status();
    return std::move(digests->front());
  }

  void ExpectAllLoaded(const absl::StatusOr<std::vector<Digest>>& digests) {
    ASSERT_THAT(digests, IsOk());
    ASSERT_EQ(digests->size(), shard().tensors.size());
    for (size_t i = 0; i < shard().tensors.size(); ++i) {
      const TensorPlacement& tensor = shard().tensors[i];
      const std::string& source = tensor.alias_of.empty() ? tensor.name : tensor.alias_of;
      const std::string wanted = TensorBytes(source, static_cast<size_t>(tensor.size_bytes));
      const auto loaded = slabs_[0].writable_bytes().subspan(static_cast<size_t>(tensor.slab_offset_bytes),
                                                             static_cast<size_t>(tensor.size_bytes));
      ASSERT_EQ(std::memcmp(loaded.data(), wanted.data(), wanted.size()), 0) << tensor.name;
      ASSERT_EQ((*digests)[i], ComputeDigest(std::as_bytes(std::span(wanted)))) << tensor.name;
    }
  }

  const TemporaryFolder folder_;
  CheckpointIdentity identity_;
  Checkpoint checkpoint_;
  NodePlan plan_;  // of one shard
  std::vector<HostSlab> slabs_;
  LoadReport report_;
};

INSTANTIATE_TEST_SUITE_P(Methods, LoadEngineTest, ::testing::Values(ReadMethod::kAuto, ReadMethod::kPread),
                         [](const auto& method) { return method.param == ReadMethod::kAuto ? "Auto" : "Pread"; });

TEST_P(LoadEngineTest, PutsEveryByteInItsPlaceForAnyChunkNumberOfThreadsAndWayOfFilling) {
  for (const FillMethod method : {FillMethod::kWrite, FillMethod::kCopy}) {
    for (const int64_t chunk_bytes : {8192, 12'288, 4 << 20}) {
      for (const int threads : {1, 3, 8}) {
        Prepare(AwkwardTensors());
        const LoadOptions options = {.reader_threads = threads, .chunk_bytes = chunk_bytes};
        ASSERT_NO_FATAL_FAILURE(ExpectAllLoaded(Load(RealFileSystem(), options, method)))
            << chunk_bytes << " bytes, " << threads << " threads";
      }
    }
  }
}

TEST_P(LoadEngineTest, ReadsWithTheThreadsThatAreToBeHad) {
  for (const int threads : {0, 1}) {
    Prepare(AwkwardTensors());
    const ThreadLimit limit(threads);
    ASSERT_NO_FATAL_FAILURE(ExpectAllLoaded(Load(RealFileSystem(), {.reader_threads = 8, .chunk_bytes = 8192})))
        << threads << " threads";
  }
}

TEST_P(LoadEngineTest, LoadsSeveralShardsIntoOneSlab) {
  CheckpointBuilder builder;
  for (int i = 0; i < 40; ++i) {
    builder.Tensor("t" + std::to_string(i), "BF16", {997}, "s" + std::to_string(i % 3) + ".safetensors");
  }
  Prepare(builder.WithIndex());
  ExpectAllLoaded(Load(RealFileSystem()));
}

TEST_P(LoadEngineTest, GivesATiedWeightTheDigestOfItsTarget) {
  Prepare(AwkwardTensors());
  checkpoint_.aliases["zz.tied"] = "large";
  Plan();
  ExpectAllLoaded(Load(RealFileSystem()));
}

TEST_P(LoadEngineTest, LoadsACheckpointOfNothingButEmptyTensors) {
  Prepare(CheckpointBuilder().Tensor("a", "BF16", {0}).Tensor("b", "F32", {3, 0}));
  ExpectAllLoaded(Load(RealFileSystem()));
}

TEST_P(LoadEngineTest, ReadsThroughThePageCacheWhereDirectReadingIsRefused) {
  Prepare(AwkwardTensors());
  FaultyFileSystem files(RealFileSystem());
  files.RefuseDirect();
  ExpectAllLoaded(Load(files));
}

// Opens with O_DIRECT and refuses only when it is read, as some network file systems do.
class RefusingOnRead : public FileSystem {
 public:
  absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path, ReadMode mode) override {
    auto file = RealFileSystem().Open(path, ReadMode::kBuffered);
    if (mode == ReadMode::kBuffered || !file.ok()) return file;
    return std::make_unique<Refusing>(*std::move(file));
  }
  absl::StatusOr<FileStat> Stat(const std::string& path) override { return RealFileSystem().Stat(path); }
  absl::StatusOr<std::string> RealPath(const std::string& path) override { return RealFileSystem().RealPath(path); }
  absl::StatusOr<std::vector<std::string>> ListFolder(const std::string& path) override {
    return RealFileSystem().ListFolder(path);
  }

 private:
  class Refusing : public File {
   public:
    explicit Refusing(std::unique_ptr<File> file) : file_(std::move(file)) {}
    absl::StatusOr<int64_t> ReadAt(int64_t, std::span<std::byte>) override { return SystemError("read", EINVAL); }
    absl::StatusOr<FileStat> Stat() override { return file_->Stat(); }
    const std::string& path() const override { return file_->path(); }

   private:
    const std::unique_ptr<File> file_;
  };
};

TEST_P(LoadEngineTest, ReadsThroughThePageCacheWhereDirectReadingIsRefusedOnlyOnRead) {
  Prepare(AwkwardTensors());
  RefusingOnRead files;
  ExpectAllLoaded(Load(files));
}

TEST_P(LoadEngineTest, PutsShortReadsTogetherWhateverTheirLength) {
  for (const int64_t length : {4096, 1000, 1}) {
    Prepare(CheckpointBuilder().Tensor("odd", "U8", {3}).Tensor("a", "BF16", {9000}));
    FaultyFileSystem files(RealFileSystem());
    files.ShortenReads(length);
    ASSERT_NO_FATAL_FAILURE(ExpectAllLoaded(Load(files))) << length;
  }
}

TEST_P(LoadEngineTest, FailsNamingTheFileThatCannotBeRead) {
  Prepare(AwkwardTensors());
  FaultyFileSystem files(RealFileSystem());
  files.FailRead(kShard, 5);
  const auto digests = Load(files);
  EXPECT_THAT(digests, StatusIs(Reason::kSystemError, HasSubstr(kShard)));
  EXPECT_THAT(digests, HasMetadata("errno", "EIO"));
}

TEST_P(LoadEngineTest, FailsNamingTheFileThatCannotBeOpened) {
  Prepare(AwkwardTensors());
  FaultyFileSystem files(RealFileSystem());
  files.FailOpen(kShard);
  EXPECT_THAT(Load(files), StatusIs(Reason::kCheckpointUnreadable, HasSubstr(kShard)));
}

TEST_P(LoadEngineTest, FailsNamingAFileThatIsTruncatedMeanwhile) {
  Prepare(AwkwardTensors());
  FaultyFileSystem files(RealFileSystem());
  files.BeforeRead(kShard, 3, [&] { std::filesystem::resize_file(folder_ / kShard, 20'000); });
  const auto digests = Load(files, {.reader_threads = 1, .chunk_bytes = 8192});
  EXPECT_THAT(digests, StatusIs(Reason::kCheckpointChanged, HasSubstr("size_bytes was")));
  EXPECT_THAT(digests, HasMetadata("file", kShard));
}

TEST_P(LoadEngineTest, FailsNamingAFileThatWasReplacedBeforeItIsOpened) {
  Prepare(AwkwardTensors());
  WriteFile(folder_ / "copy", ReadFile(folder_ / kShard));
  std::filesystem::rename(folder_ / "copy", folder_ / kShard);
  EXPECT_THAT(Load(RealFileSystem()), StatusIs(Reason::kCheckpointChanged, HasSubstr(kShard)));
}

TEST_P(LoadEngineTest, FailsForAFileThatWasNotFingerprinted) {
  Prepare(AwkwardTensors());
  identity_.files.pop_back();
  EXPECT_THAT(Load(RealFileSystem()), StatusIs(Reason::kCheckpointChanged, HasSubstr(kShard)));
}

TEST_P(LoadEngineTest, EndsWithTheErrorOfItsProgressCallbackAndStopsReading) {
  Prepare(AwkwardTensors());
  FaultyFileSystem files(RealFileSystem());
  const absl::Status gone = MakeError(Reason::kServiceUnavailable, "the broker has gone");
  std::atomic<bool> reported = false;
  // The reader waits for the report, so that there is one while it still has work to do.
  files.BeforeRead(kShard, 2, [&] {
    while (!reported) std::this_thread::yield();
  });

  const auto digests =
      Load(files, {.reader_threads = 1, .chunk_bytes = 8192, .progress_interval = std::chrono::milliseconds(1)},
           FillMethod::kBest, [&](int64_t) {
             reported = true;
             return gone;
           });

  EXPECT_THAT(digests, StatusIs(Reason::kServiceUnavailable));
  EXPECT_LT(files.reads(), plan_.read_bytes / 8192) << "the rest is not read";
}

TEST_P(LoadEngineTest, ReportsProgressUpToTheLastByte) {
  Prepare(AwkwardTensors());
  std::vector<int64_t> reports;
  ASSERT_THAT(Load(RealFileSystem(), {}, FillMethod::kBest,
                   [&](int64_t done_bytes) {
                     reports.push_back(done_bytes);
                     return absl::OkStatus();
                   }),
              IsOk());
  EXPECT_TRUE(std::is_sorted(reports.begin(), reports.end()));
  EXPECT_EQ(reports.back(), plan_.read_bytes);
}

TEST_P(LoadEngineTest, ReadsInAsFewChunksAsTheBytesTake) {
  for (size_t padding = 0; padding == 0 || checkpoint_.tensors[0].offset_bytes % 8 != 0; ++padding) {
    Prepare(CheckpointBuilder().Tensor("a", "BF16", {200'000}).Metadata("padding", std::string(padding, 'x')));
  }
  FaultyFileSystem files(RealFileSystem());
  ExpectAllLoaded(Load(files));
  EXPECT_LE(files.reads(), 400'000 / 8192 + 2);
}

TEST_P(LoadEngineTest, HasReadsUnderWayTogetherWhereThereIsIoUring) {
  if (const auto queue = RealFileSystem().NewReadQueue(1); !queue.ok()) GTEST_SKIP() << queue.status().message();
  Prepare(AwkwardTensors());
  FaultyFileSystem files(RealFileSystem());
  ExpectAllLoaded(Load(files, {.reader_threads = 1, .reads_per_thread = 3, .chunk_bytes = 8192}));
  const bool queues = GetParam() == ReadMethod::kAuto;
  EXPECT_EQ(files.queued_reads() > 0, queues);
  EXPECT_EQ(report_.reads_per_thread, queues ? 3 : 1);
  EXPECT_EQ(report_.read_method, queues ? ReadMethod::kIoUring : ReadMethod::kPread);
  EXPECT_GE(report_.direct_bytes, plan_.read_bytes);
}

TEST_P(LoadEngineTest, ReadsOneAfterTheOtherWhereIoUringIsRefused) {
  Prepare(AwkwardTensors());
  FaultyFileSystem files(RealFileSystem());
  files.RefuseReadQueues();
  ::testing::internal::CaptureStderr();
  const auto digests = Load(files);
  const std::string log = ::testing::internal::GetCapturedStderr();
  ExpectAllLoaded(digests);
  EXPECT_EQ(report_.read_method, ReadMethod::kPread);
  EXPECT_EQ(log.find("load.io_uring_unavailable") != std::string::npos, GetParam() == ReadMethod::kAuto) << log;
}

TEST_P(LoadEngineTest, FailsWhereItMustReadByIoUringAndThatIsRefused) {
  Prepare(AwkwardTensors());
  FaultyFileSystem files(RealFileSystem());
  files.RefuseReadQueues();
  std::vector<std::unique_ptr<Destination>> destinations;
  destinations.push_back(MakeHostDestination(shard(), slabs_));
  const auto load = LoadNode({files, checkpoint_, identity_, plan_}, destinations,
                             {.read_method = ReadMethod::kIoUring}, [](int64_t) { return absl::OkStatus(); });
  EXPECT_THAT(load, HasMetadata("errno", "EPERM"));
  EXPECT_THAT(load, StatusIs(Reason::kSystemError, HasSubstr("with auto or pread it is read without")));
}

TEST_P(LoadEngineTest, ReadsAnewPastThePageCacheWhatTheQueueCouldNotRead) {
  for (const int error_number : {EINVAL, EOPNOTSUPP, EFAULT, EINTR, EAGAIN, ECANCELED}) {
    Prepare(AwkwardTensors());
    FaultyFileSystem files(RealFileSystem());
    files.EndQueuedReadsWith(error_number);
    ASSERT_NO_FATAL_FAILURE(ExpectAllLoaded(Load(files))) << error_number;
    EXPECT_GE(report_.direct_bytes, plan_.read_bytes) << error_number;
  }
}

TEST_P(LoadEngineTest, FailsNamingTheFileWhateverReadsItWhereTheDiskFails) {
  if (GetParam() == ReadMethod::kPread) GTEST_SKIP() << "there is no queue";
  Prepare(AwkwardTensors());
  FaultyFileSystem files(RealFileSystem());
  files.EndQueuedReadsWith(EIO);
  EXPECT_THAT(Load(files), StatusIs(Reason::kSystemError, HasSubstr(kShard)));
}

TEST_P(LoadEngineTest, ReadsAllTheSameWhereAThreadIsRefusedWhatTheFirstWasGiven) {
  Prepare(AwkwardTensors());
  FaultyFileSystem files(RealFileSystem());
  files.RefuseReadQueuesFrom(3);  // the first is a trial
  ::testing::internal::CaptureStderr();
  const auto digests = Load(files, {.reader_threads = 4, .chunk_bytes = 8192});
  const std::string log = ::testing::internal::GetCapturedStderr();
  ExpectAllLoaded(digests);
  if (GetParam() == ReadMethod::kPread) return;
  EXPECT_EQ(report_.read_method, ReadMethod::kPread) << "not all of it was read by io_uring";
  EXPECT_THAT(log, HasSubstr("load.io_uring_unavailable"));
}

TEST_P(LoadEngineTest, ReadsWhatThePageCacheHoldsThroughIt) {
  Prepare(AwkwardTensors());
  FaultyFileSystem files(RealFileSystem());
  files.PretendCached();
  ExpectAllLoaded(Load(files));
  EXPECT_EQ(files.queued_reads(), 0);
  EXPECT_EQ(report_.direct_bytes, 0);
}

TEST_P(LoadEngineTest, CopiesFromMemoryInChunksOfTheirOwnWithOneReadAThread) {
  Prepare(AwkwardTensors());
  testing::FaultyFileSystem files(RealFileSystem());
  files.PretendCached();
  ASSERT_NO_FATAL_FAILURE(
      ExpectAllLoaded(Load(files, {.reader_threads = 3, .memory_chunk_bytes = 3 * kDirectAlignmentBytes})));
  EXPECT_EQ(report_.buffer_bytes, 4 * kDirectAlignmentBytes) << "with its ends rounded out";
  EXPECT_EQ(report_.reads_per_thread, 1);
  EXPECT_EQ(report_.direct_bytes, 0);
  EXPECT_EQ(report_.storage_reads, 0);
}

TEST_P(LoadEngineTest, TakesEachPartFromWhereItIs) {
  Prepare(AwkwardTensors());
  testing::FaultyFileSystem files(RealFileSystem());
  files.PretendCachedBefore(150'000);
  ASSERT_NO_FATAL_FAILURE(ExpectAllLoaded(Load(files, {.reader_threads = 4, .chunk_bytes = 8192})));
  if (report_.direct_bytes == 0) GTEST_SKIP() << "no O_DIRECT here";
  EXPECT_LT(report_.direct_bytes, plan_.read_bytes);
  EXPECT_GT(report_.storage_reads, 0);
}

TEST_P(LoadEngineTest, ReadsFromStorageWhatMemoryHasLostSinceTheFilesWereOpened) {
  Prepare(AwkwardTensors());
  testing::FaultyFileSystem files(RealFileSystem());
  files.PretendCachedFor(10);
  ASSERT_NO_FATAL_FAILURE(ExpectAllLoaded(Load(files, {.reader_threads = 4, .chunk_bytes = 8192})));
  if (report_.direct_bytes == 0) GTEST_SKIP() << "no O_DIRECT here";
  EXPECT_EQ(report_.reads_per_thread, 1);
  EXPECT_GT(report_.storage_reads, 0);
}

// A storage that reads ahead is served best by it; each of many threads has reads to do all the same.
TEST_P(LoadEngineTest, ReadsAFileFromItsStartToItsEndHoweverManyThreadsThereAre) {
  constexpr int64_t kChunk = 512 << 10;
  constexpr size_t kUnderWay = (8 << 20) / kChunk;
  Prepare(CheckpointBuilder().Tensor("large", "U8", {64 * kChunk}));
  testing::FaultyFileSystem files(RealFileSystem());
  ASSERT_NO_FATAL_FAILURE(
      ExpectAllLoaded(Load(files, {.reader_threads = 16, .reads_per_thread = 4, .chunk_bytes = kChunk})));
  if (report_.direct_bytes == 0) GTEST_SKIP() << "no O_DIRECT here";
  std::vector<int64_t> offsets = files.read_offsets();
  std::vector<int64_t> sorted = offsets;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < offsets.size(); ++i) {
    const auto place = static_cast<size_t>(std::lower_bound(sorted.begin(), sorted.end(), offsets[i]) - sorted.begin());
    EXPECT_LE(place, i + kUnderWay) << "read " << i << " was too early";
  }
}

TEST_P(LoadEngineTest, KeepsItsBuffersWithinTheirLimitAsFarAsOneGoes) {
  for (const int64_t limit : {1, 8192, 5 * 8192, 100 * 8192}) {
    Prepare(AwkwardTensors());
    LoadOptions options = {.reader_threads = 4, .reads_per_thread = 4, .chunk_bytes = 8192};
    options.max_buffers_bytes = limit;
    ASSERT_NO_FATAL_FAILURE(ExpectAllLoaded(Load(RealFileSystem(), options)));
    EXPECT_LE(report_.buffers_bytes, std::max<int64_t>(limit, 8192 + kDirectAlignmentBytes));
    EXPECT_GE(report_.reader_threads, 1);
  }
}

}  // namespace
}  // namespace weightbroker
