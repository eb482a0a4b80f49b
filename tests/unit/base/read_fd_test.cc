#include "common/base/read_fd.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "common/base/unique_fd.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::weightbroker::testing::HasMetadata;

UniqueFd MakeMemfd(const std::string& contents) {
  UniqueFd fd(memfd_create("read_fd_test", MFD_CLOEXEC));
  EXPECT_EQ(write(fd.get(), contents.data(), contents.size()), static_cast<ssize_t>(contents.size()));
  return fd;  // its offset is at the end
}

TEST(ReadFd, ReadsFromTheBeginningWhereverTheOffsetIs) {
  EXPECT_EQ(ReadFd(MakeMemfd("abcdef").get(), 4, "x").value(), "abcd");
}

TEST(ReadFd, GivesWhatIsThereOfAFileThatEndsBefore) {
  EXPECT_EQ(ReadFd(MakeMemfd("abc").get(), 10, "x").value(), "abc");
}

TEST(ReadFd, NamesTheErrno) { EXPECT_THAT(ReadFd(-1, 4, "reading nothing"), HasMetadata("errno", "EBADF")); }

}  // namespace
}  // namespace weightbroker
