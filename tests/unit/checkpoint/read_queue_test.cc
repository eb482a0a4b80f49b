#include "common/base/read_queue.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "common/base/error.h"
#include "common/base/file.h"
#include "common/base/unique_fd.h"
#include "tests/support/memory_files.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;
using testing::TemporaryFolder;
using testing::WriteFile;

class ReadQueueTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto queue = RealFileSystem().NewReadQueue(4);
    if (!queue.ok()) GTEST_SKIP() << "no io_uring here: " << queue.status().message();
    queue_ = *std::move(queue);
    WriteFile(folder_ / "file", "0123456789");
    file_ = *RealFileSystem().Open(folder_ / "file", ReadMode::kBuffered);
  }

  const TemporaryFolder folder_;
  std::unique_ptr<File> file_;
  std::unique_ptr<ReadQueue> queue_;
};

TEST_F(ReadQueueTest, ReadsSeveralPartsAndTellsWhichIsWhich) {
  std::map<uint64_t, std::string> parts;
  for (uint64_t tag = 0; tag < 4; ++tag) {
    std::string& part = parts[tag] = std::string(3, '-');
    ASSERT_THAT(queue_->Start(*file_, static_cast<int64_t>(3 * tag), std::as_writable_bytes(std::span(part)), tag),
                IsOk());
  }
  std::map<uint64_t, int64_t> counts;
  for (int i = 0; i < 4; ++i) {
    const ReadQueue::Completion done = queue_->Wait();
    EXPECT_EQ(done.error_number, 0);
    counts[done.tag] = done.count;
  }
  EXPECT_THAT(counts, ::testing::ElementsAre(std::pair(0, 3), std::pair(1, 3), std::pair(2, 3), std::pair(3, 1)));
  EXPECT_EQ(parts[0] + parts[1] + parts[2] + parts[3], "0123456789--");
}

TEST_F(ReadQueueTest, SaysNothingIsLeftPastTheEnd) {
  std::string buffer(8, '-');
  ASSERT_THAT(queue_->Start(*file_, 10, std::as_writable_bytes(std::span(buffer)), 1), IsOk());
  const ReadQueue::Completion done = queue_->Wait();
  EXPECT_EQ(done.count, 0);
  EXPECT_EQ(done.error_number, 0);
}

TEST_F(ReadQueueTest, TellsWhatTheKernelRefuses) {
  const auto direct = RealFileSystem().Open(folder_ / "file", ReadMode::kDirect);
  if (!direct.ok()) GTEST_SKIP() << "no O_DIRECT here";
  std::string buffer(8, '-');
  ASSERT_THAT(queue_->Start(**direct, 1, std::as_writable_bytes(std::span(buffer)), 1), IsOk());
  const ReadQueue::Completion done = queue_->Wait();
  if (done.error_number == 0) GTEST_SKIP() << "this file system aligns by itself";
  EXPECT_EQ(done.error_number, EINVAL);
}

TEST_F(ReadQueueTest, RefusesAFileWithoutADescriptor) {
  MemoryFile file("in memory", "abc");
  std::string buffer(3, '-');
  EXPECT_THAT(queue_->Start(file, 0, std::as_writable_bytes(std::span(buffer)), 1),
              StatusIs(Reason::kSystemError, HasSubstr("in memory")));
}

TEST_F(ReadQueueTest, WaitsForWhatIsUnderWayBeforeItGoes) {
  std::vector<char> buffer(10, '-');
  ASSERT_THAT(queue_->Start(*file_, 0, std::as_writable_bytes(std::span(buffer)), 1), IsOk());
  queue_.reset();
  EXPECT_EQ(std::string(buffer.begin(), buffer.end()), "0123456789");
}

// Evicting is a wish, which tmpfs and some others do not grant.
TEST_F(ReadQueueTest, KnowsWhatThePageCacheHolds) {
  const std::string path = folder_ / "large";
  WriteFile(path, std::string(1 << 20, 'x'));
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  const auto file = RealFileSystem().Open(path, ReadMode::kBuffered);
  EXPECT_TRUE((*file)->IsCached(0, 1 << 20));
  ASSERT_EQ(fsync(fd.get()), 0);
  ASSERT_EQ(posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED), 0);
  if ((*file)->IsCached(0, 1 << 20)) GTEST_SKIP() << "this file system keeps its pages";
  std::vector<std::byte> some(4096);
  ASSERT_THAT((*file)->ReadExactly(8192, some), IsOk());
  EXPECT_TRUE((*file)->IsCached(8192 + 5, 100));
  EXPECT_FALSE((*file)->IsCached(0, 1 << 20));
}

}  // namespace
}  // namespace weightbroker
