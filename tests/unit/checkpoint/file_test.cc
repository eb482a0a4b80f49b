#include "common/base/file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "tests/support/faulty_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::weightbroker::testing::FaultyFileSystem;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::TemporaryFolder;
using ::weightbroker::testing::WriteFile;

class FileTest : public ::testing::Test {
 protected:
  static std::string Read(File& file, int64_t offset, size_t size) {
    std::string text(size, '\0');
    const absl::Status status = file.ReadExactly(offset, std::as_writable_bytes(std::span(text)));
    return status.ok() ? text : std::string(status.message());
  }

  const TemporaryFolder dir_;
  const std::string path_ = dir_ / "f";
};

TEST_F(FileTest, ReadsExactlyWhatIsAskedFor) {
  WriteFile(path_, "0123456789");
  const auto file = RealFileSystem().Open(path_, ReadMode::kBuffered);

  ASSERT_THAT(file, IsOk());
  EXPECT_EQ(Read(**file, 3, 4), "3456");
  EXPECT_EQ(Read(**file, 10, 0), "");
  EXPECT_EQ((*file)->path(), path_);
}

TEST_F(FileTest, PutsShortReadsTogether) {
  WriteFile(path_, "0123456789");
  FaultyFileSystem files(RealFileSystem());
  files.ShortenReads(3);

  EXPECT_EQ(Read(**files.Open(path_, ReadMode::kBuffered), 0, 10), "0123456789");
  EXPECT_EQ(files.reads(), 4);
  EXPECT_EQ(*files.ReadSmallFile(path_, 100), "0123456789");
}

TEST_F(FileTest, NamesExpectedAndFoundOfATruncatedFile) {
  WriteFile(path_, "0123");
  const auto file = RealFileSystem().Open(path_, ReadMode::kBuffered);
  std::string text(8, '\0');

  const absl::Status status = (*file)->ReadExactly(2, std::as_writable_bytes(std::span(text)));

  EXPECT_THAT(status, StatusIs(Reason::kCheckpointTruncated, HasSubstr(path_)));
  EXPECT_THAT(status, HasMetadata("expected_bytes", "10"));
  EXPECT_THAT(status, HasMetadata("found_bytes", "4"));
}

TEST_F(FileTest, SeesAnEditThatRestoresSizeAndModificationTime) {
  WriteFile(path_, "aaaa");
  const FileStat before = *RealFileSystem().Stat(path_);
  const timespec times[2] = {{0, UTIME_OMIT}, {before.mtime_ns / 1'000'000'000, before.mtime_ns % 1'000'000'000}};
  usleep(20'000);  // more than a tick of the clock that files are stamped with

  WriteFile(path_, "bbbb");
  ASSERT_EQ(utimensat(AT_FDCWD, path_.c_str(), times, 0), 0);

  const FileStat after = *RealFileSystem().Stat(path_);
  EXPECT_EQ(after.mtime_ns, before.mtime_ns);
  EXPECT_EQ(after.size_bytes, before.size_bytes);
  EXPECT_EQ(after.inode, before.inode);
  EXPECT_NE(after, before);
}

TEST_F(FileTest, TellsFilesFromFolders) {
  WriteFile(path_, "");
  EXPECT_TRUE(RealFileSystem().Stat(path_)->is_regular_file);
  EXPECT_TRUE(RealFileSystem().Stat(dir_.path())->is_directory);
}

TEST_F(FileTest, RefusesToOpenAFolder) {
  EXPECT_THAT(RealFileSystem().Open(dir_.path(), ReadMode::kBuffered),
              StatusIs(Reason::kCheckpointUnreadable, HasSubstr("is a folder")));
}

TEST_F(FileTest, RefusesAFifoWithoutWaitingForAWriter) {
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  EXPECT_THAT(RealFileSystem().Open(path_, ReadMode::kBuffered),
              StatusIs(Reason::kCheckpointUnreadable, HasSubstr("special file")));
}

TEST_F(FileTest, SaysWhyAFileCannotBeOpened) {
  EXPECT_THAT(RealFileSystem().Open(path_, ReadMode::kBuffered), HasMetadata("errno", "ENOENT"));
  EXPECT_THAT(RealFileSystem().Open(dir_ / std::string(300, 'x'), ReadMode::kBuffered),
              HasMetadata("errno", "ENAMETOOLONG"));
}

TEST_F(FileTest, TellsWhatIsNotThereFromWhatCannotBeLookedAt) {
  EXPECT_THAT(RealFileSystem().Stat(path_), StatusIs(Reason::kModelNotFound));
  EXPECT_THAT(RealFileSystem().RealPath(path_ + "/x"), StatusIs(Reason::kModelNotFound));
  ASSERT_EQ(symlink("f", path_.c_str()), 0);
  EXPECT_THAT(RealFileSystem().Stat(path_), StatusIs(Reason::kCheckpointUnreadable));
}

TEST_F(FileTest, DoesNotCutAPathAtANul) {
  WriteFile(path_, "x");
  const std::string path = path_ + std::string("\0.json", 6);
  EXPECT_THAT(RealFileSystem().Open(path, ReadMode::kBuffered), StatusIs(Reason::kCheckpointUnreadable));
  EXPECT_THAT(RealFileSystem().Stat(path), StatusIs(Reason::kCheckpointUnreadable));
  EXPECT_THAT(RealFileSystem().RealPath(path), StatusIs(Reason::kCheckpointUnreadable));
}

TEST_F(FileTest, ResolvesSymbolicLinks) {
  WriteFile(path_, "x");
  ASSERT_EQ(symlink(path_.c_str(), (dir_ / "link").c_str()), 0);
  EXPECT_EQ(*RealFileSystem().RealPath(dir_ / "link"), path_);
}

TEST_F(FileTest, ListsAFolderSorted) {
  for (const char* name : {"b", "a", "c"}) WriteFile(dir_ / name, "");
  EXPECT_THAT(*RealFileSystem().ListFolder(dir_.path()), ElementsAre("a", "b", "c"));
  EXPECT_THAT(RealFileSystem().ListFolder(path_), StatusIs(Reason::kModelNotFound));
}

TEST_F(FileTest, LimitsWhatASmallFileMayBe) {
  WriteFile(path_, "0123456789");
  EXPECT_EQ(RealFileSystem().ReadSmallFile(path_, 10)->size(), 10u);
  EXPECT_THAT(RealFileSystem().ReadSmallFile(path_, 9), StatusIs(Reason::kCheckpointTooLarge, HasSubstr("at most 9")));
}

TEST_F(FileTest, LimitsASmallFileThatGrowsWhileItIsRead) {
  WriteFile(path_, "0123");
  FaultyFileSystem files(RealFileSystem());
  files.BeforeRead("f", 1, [this] { WriteFile(path_, std::string(100, 'x')); });
  EXPECT_THAT(files.ReadSmallFile(path_, 10), StatusIs(Reason::kCheckpointTooLarge));
}

TEST_F(FileTest, ReadsFilesWhoseSizeIsNotKnown) {
  EXPECT_THAT(*RealFileSystem().ReadSmallFile("/proc/self/status", 100'000), HasSubstr("Pid:"));
}

TEST_F(FileTest, PassesReadErrorsOn) {
  WriteFile(path_, "0123");
  FaultyFileSystem files(RealFileSystem());
  files.FailRead("f", 2);
  const auto file = files.Open(path_, ReadMode::kBuffered);

  EXPECT_EQ(Read(**file, 0, 2), "01");
  std::string text(2, '\0');
  const absl::Status status = (*file)->ReadExactly(0, std::as_writable_bytes(std::span(text)));
  EXPECT_THAT(status, StatusIs(Reason::kSystemError, HasSubstr(path_)));
  EXPECT_THAT(status, HasMetadata("errno", "EIO"));
}

TEST_F(FileTest, LetsATestRefuseDirectReads) {
  WriteFile(path_, "0123");
  FaultyFileSystem files(RealFileSystem());
  files.RefuseDirect();
  EXPECT_THAT(files.Open(path_, ReadMode::kDirect), HasMetadata("errno", "EINVAL"));
  EXPECT_THAT(files.Open(path_, ReadMode::kBuffered), IsOk());
}

}  // namespace
}  // namespace weightbroker
