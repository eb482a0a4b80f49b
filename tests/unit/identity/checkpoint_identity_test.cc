#include "common/identity/checkpoint_identity.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <time.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "common/identity/sha256.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::weightbroker::testing::CheckpointBuilder;
using ::weightbroker::testing::FaultyFileSystem;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::ReadFile;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::TemporaryFolder;
using ::weightbroker::testing::WriteFile;

constexpr char kShard[] = "model.safetensors";

CheckpointBuilder TwoShards() {
  return CheckpointBuilder()
      .Tensor("a", "BF16", {16}, "model-00001-of-00002.safetensors")
      .Tensor("b", "BF16", {32}, "model-00002-of-00002.safetensors")
      .WithIndex();
}

CheckpointIdentity ReadIdentity(const std::string& folder) {
  const auto identity = ReadCheckpointIdentity(RealFileSystem(), folder);
  EXPECT_THAT(identity, IsOk());
  return identity.ok() ? *identity : CheckpointIdentity{};
}

TEST(Sha256, HasTheValueOfTheStandardsExample) {
  EXPECT_EQ(Sha256Hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Sha256Bytes("").size(), 32u);
}

TEST(CheckpointIdentity, ListsConfigIndexSideFilesAndShardsSortedByName) {
  const TemporaryFolder folder;
  TwoShards().File("hf_quant_config.json", "{}").File("tokenizer.json", "{}").Write(folder.path());

  const CheckpointIdentity identity = ReadIdentity(folder.path());

  std::vector<std::string> names;
  for (const FileIdentity& file : identity.files) names.push_back(file.name);
  EXPECT_THAT(names, ElementsAre("config.json", "hf_quant_config.json", "model-00001-of-00002.safetensors",
                                 "model-00002-of-00002.safetensors", "model.safetensors.index.json"));
}

TEST(CheckpointIdentity, HashesJsonFilesWholeAndOfShardsTheHeaderWithItsLength) {
  const TemporaryFolder folder;
  const CheckpointBuilder builder = CheckpointBuilder().Tensor("a", "BF16", {16});
  builder.Write(folder.path());

  const CheckpointIdentity identity = ReadIdentity(folder.path());

  ASSERT_EQ(identity.files.size(), 2u);
  EXPECT_EQ(identity.files[0].contents_sha256, Sha256Hex(testing::kPlainConfig));
  EXPECT_EQ(identity.files[0].header_sha256, "");
  const std::string bytes = builder.FileBytes();
  EXPECT_EQ(identity.files[1].header_sha256, Sha256Hex(bytes.substr(0, bytes.size() - 32)));
  EXPECT_EQ(identity.files[1].contents_sha256, "");
  EXPECT_EQ(identity.files[1].stat.size_bytes, static_cast<int64_t>(bytes.size()));
}

TEST(CheckpointIdentity, TakesTheContentHashFromTheNameOfAHubCachesBlob) {
  const TemporaryFolder cache;
  const std::string sha(64, 'a');
  std::filesystem::create_directories(cache / "blobs");
  std::filesystem::create_directories(cache / "snapshots/main");
  const CheckpointBuilder builder = CheckpointBuilder().Tensor("a", "BF16", {16});
  WriteFile(cache / ("blobs/" + sha), builder.FileBytes());
  WriteFile(cache / "blobs/0123456789012345678901234567890123456789", testing::kPlainConfig);
  std::filesystem::create_symlink("../../blobs/" + sha, cache / "snapshots/main/model.safetensors");
  std::filesystem::create_symlink("../../blobs/0123456789012345678901234567890123456789",
                                  cache / "snapshots/main/config.json");

  const CheckpointIdentity identity = ReadIdentity(cache / "snapshots/main");

  ASSERT_EQ(identity.files.size(), 2u);
  EXPECT_EQ(identity.files[1].contents_sha256, sha);
}

TEST(CheckpointIdentity, KnowsAHubBlobByFolderAndName) {
  const std::string sha = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
  EXPECT_EQ(HubBlobSha256("/cache/models--a/blobs/" + sha), sha);
  EXPECT_EQ(HubBlobSha256("/cache/models--a/blobs/" + sha.substr(0, 40)), "") << "a git object's SHA-1";
  EXPECT_EQ(HubBlobSha256("/cache/models--a/files/" + sha), "");
  EXPECT_EQ(HubBlobSha256("/cache/notblobs/" + sha), "");
  EXPECT_EQ(HubBlobSha256("/cache/blobs/" + sha + ".incomplete"), "");
  EXPECT_EQ(HubBlobSha256("/cache/blobs/" + std::string(64, 'G')), "");
  EXPECT_EQ(HubBlobSha256(sha), "");
  EXPECT_EQ(HubBlobSha256(""), "");
}

TEST(CheckpointIdentity, IsUnchangedWhileNobodyTouchesTheFiles) {
  const TemporaryFolder folder;
  TwoShards().Write(folder.path());
  EXPECT_THAT(CheckUnchanged(RealFileSystem(), ReadIdentity(folder.path())), IsOk());
}

TEST(CheckpointIdentity, SeesAnEditThatRestoresSizeAndModificationTime) {
  const TemporaryFolder folder;
  CheckpointBuilder().Tensor("a", "BF16", {16}).Write(folder.path());
  const CheckpointIdentity identity = ReadIdentity(folder.path());
  const std::string path = folder / kShard;
  struct stat before {};
  ASSERT_EQ(stat(path.c_str(), &before), 0);

  const int fd = open(path.c_str(), O_WRONLY);
  ASSERT_EQ(pwrite(fd, "x", 1, before.st_size - 1), 1);
  close(fd);
  const timespec times[2] = {before.st_atim, before.st_mtim};
  ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);

  const absl::Status status = CheckUnchanged(RealFileSystem(), identity);
  EXPECT_THAT(status, StatusIs(Reason::kCheckpointChanged, HasSubstr(kShard)));
  EXPECT_THAT(status, AllOf(HasMetadata("file", kShard), HasMetadata("changed", "ctime_ns")));
}

// Kernels before 6.13 stamp files with a clock that ticks every few milliseconds, and some file systems still do:
// within one tick a second change leaves no trace.
TEST(CheckpointIdentity, IsReadOnlyOnceAnotherChangeWouldLeaveATrace) {
  const TemporaryFolder folder;
  CheckpointBuilder().Tensor("a", "BF16", {16}).Write(folder.path());

  const CheckpointIdentity identity = ReadIdentity(folder.path());

  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  EXPECT_GE(now.tv_sec * 1'000'000'000 + now.tv_nsec, identity.files[1].stat.ctime_ns + 20'000'000);
}

TEST(CheckpointIdentity, SeesAnEditRightAfterAFileThatWasJustWritten) {
  const TemporaryFolder folder;
  CheckpointBuilder().Tensor("a", "BF16", {16}).Write(folder.path());
  const CheckpointIdentity identity = ReadIdentity(folder.path());
  const int fd = open((folder / kShard).c_str(), O_WRONLY);
  ASSERT_EQ(pwrite(fd, "x", 1, identity.files[1].stat.size_bytes - 1), 1);
  close(fd);

  EXPECT_THAT(CheckUnchanged(RealFileSystem(), identity), StatusIs(Reason::kCheckpointChanged));
}

TEST(CheckpointIdentity, SeesAFileReplacedByACopyOfItself) {
  const TemporaryFolder folder;
  CheckpointBuilder().Tensor("a", "BF16", {16}).Write(folder.path());
  const CheckpointIdentity identity = ReadIdentity(folder.path());
  WriteFile(folder / "copy", ReadFile(folder / kShard));
  std::filesystem::rename(folder / "copy", folder / kShard);

  EXPECT_THAT(CheckUnchanged(RealFileSystem(), identity), StatusIs(Reason::kCheckpointChanged, HasSubstr("inode was")));
}

TEST(CheckpointIdentity, SaysThatAFileIsGone) {
  const TemporaryFolder folder;
  TwoShards().Write(folder.path());
  const CheckpointIdentity identity = ReadIdentity(folder.path());
  std::filesystem::remove(folder / "model-00002-of-00002.safetensors");

  const absl::Status status = CheckUnchanged(RealFileSystem(), identity);
  EXPECT_THAT(status,
              StatusIs(Reason::kCheckpointChanged, HasSubstr("model-00002-of-00002.safetensors: the file is gone")));
  EXPECT_THAT(status, HasMetadata("changed", "gone"));
}

TEST(CheckpointIdentity, ChecksWithoutOpeningAnyFile) {
  const TemporaryFolder folder;
  TwoShards().Write(folder.path());
  const CheckpointIdentity identity = ReadIdentity(folder.path());
  FaultyFileSystem files(RealFileSystem());
  files.FailOpen("");

  EXPECT_THAT(CheckUnchanged(files, identity), IsOk());
}

TEST(CheckpointIdentity, IsNotGivenForAFileThatChangesWhileItIsRead) {
  const TemporaryFolder folder;
  CheckpointBuilder().Tensor("a", "BF16", {16}).Write(folder.path());
  FaultyFileSystem files(RealFileSystem());
  files.BeforeRead(kShard, 1, [&] { WriteFile(folder / kShard, ReadFile(folder / kShard)); });

  EXPECT_THAT(ReadCheckpointIdentity(files, folder.path()), StatusIs(Reason::kCheckpointChanged, HasSubstr(kShard)));
}

TEST(CheckpointIdentity, ReadsNoWeights) {
  const TemporaryFolder folder;
  CheckpointBuilder().Tensor("a", "BF16", {4 << 20}).Write(folder.path());
  FaultyFileSystem files(RealFileSystem());

  ASSERT_THAT(ReadCheckpointIdentity(files, folder.path()), IsOk());

  EXPECT_LE(files.reads(), 6) << "config, length and header, with their ends";
}

TEST(CheckpointIdentity, RefusesAHeaderOverTheLimitBeforeReadingIt) {
  const TemporaryFolder folder;
  CheckpointBuilder().Tensor("a", "BF16", {16}).Write(folder.path());
  WriteFile(folder / kShard, std::string("\x01\xE1\xF5\x05\0\0\0\0", 8) + "{}");
  std::filesystem::resize_file(folder / kShard, 200'000'000);  // a sparse file, large enough for such a header

  EXPECT_THAT(ReadCheckpointIdentity(RealFileSystem(), folder.path()),
              StatusIs(Reason::kCheckpointTooLarge, HasSubstr("100000001")));
}

TEST(CheckpointIdentity, DescribesABrokenHeaderAsTheReaderOfHeadersDoes) {
  const TemporaryFolder folder;
  CheckpointBuilder().Tensor("a", "BF16", {16}).Write(folder.path());
  const std::string bytes = ReadFile(folder / kShard);
  WriteFile(folder / kShard, bytes.substr(0, 20));

  EXPECT_THAT(ReadCheckpointIdentity(RealFileSystem(), folder.path()), StatusIs(Reason::kCheckpointTruncated));
}

TEST(CheckpointIdentity, SurvivesTheLoadersRequest) {
  const TemporaryFolder folder;
  TwoShards().Write(folder.path());
  const CheckpointIdentity identity = ReadIdentity(folder.path());
  internal::v1::LoadRequest request;

  ToProto(identity, &request);
  const CheckpointIdentity parsed = FromProto(request);

  EXPECT_EQ(parsed.folder, identity.folder);
  ASSERT_EQ(parsed.files.size(), identity.files.size());
  for (size_t i = 0; i < parsed.files.size(); ++i) {
    EXPECT_EQ(parsed.files[i].name, identity.files[i].name);
    EXPECT_EQ(parsed.files[i].stat, identity.files[i].stat);
  }
  EXPECT_THAT(CheckUnchanged(RealFileSystem(), parsed), IsOk());
}

}  // namespace
}  // namespace weightbroker
