#include "common/base/socket.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <thread>

#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;

SocketPair MakePair() {
  auto pair = CreateSeqpacketPair();
  EXPECT_THAT(pair, IsOk());
  return *std::move(pair);
}

ino_t InodeOf(int fd) {
  struct stat status {};
  EXPECT_EQ(fstat(fd, &status), 0);
  return status.st_ino;
}

size_t OpenFdCount() {
  const std::filesystem::directory_iterator entries("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(entries), end(entries)));
}

TEST(Socket, CarriesBytesAndDescriptorsInOrder) {
  const SocketPair pair = MakePair();
  const UniqueFd first(open("/dev/null", O_RDONLY));
  const UniqueFd second(open("/dev/zero", O_RDONLY));
  const int fds[] = {first.get(), second.get()};

  ASSERT_THAT(SendMessage(pair.first.get(), "hello", fds), IsOk());
  const auto message = ReceiveMessage(pair.second.get());

  ASSERT_THAT(message, IsOk());
  EXPECT_FALSE(message->closed);
  EXPECT_EQ(message->bytes, "hello");
  ASSERT_EQ(message->fds.size(), 2u);
  EXPECT_EQ(InodeOf(message->fds[0].get()), InodeOf(first.get()));
  EXPECT_EQ(InodeOf(message->fds[1].get()), InodeOf(second.get()));
}

TEST(Socket, GivesReceivedDescriptorsCloseOnExec) {
  const SocketPair pair = MakePair();
  const UniqueFd null(open("/dev/null", O_RDONLY));
  const int fds[] = {null.get()};

  ASSERT_THAT(SendMessage(pair.first.get(), "x", fds), IsOk());
  const auto message = ReceiveMessage(pair.second.get());

  ASSERT_THAT(message, IsOk());
  EXPECT_NE(fcntl(message->fds.at(0).get(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(Socket, CarriesTheMostDescriptorsThatLinuxAllows) {
  RaiseFdLimit();
  const SocketPair pair = MakePair();
  const UniqueFd null(open("/dev/null", O_RDONLY));
  const std::vector<int> fds(kMaxFdsPerMessage, null.get());

  ASSERT_THAT(SendMessage(pair.first.get(), "x", fds), IsOk());
  const auto message = ReceiveMessage(pair.second.get());

  ASSERT_THAT(message, IsOk());
  EXPECT_EQ(message->fds.size(), static_cast<size_t>(kMaxFdsPerMessage));
}

TEST(Socket, RefusesOneDescriptorMoreThanLinuxAllows) {
  const SocketPair pair = MakePair();
  const std::vector<int> fds(kMaxFdsPerMessage + 1, 0);

  EXPECT_THAT(SendMessage(pair.first.get(), "x", fds), StatusIs(Reason::kInvalidArgument, HasSubstr("254")));
}

TEST(Socket, RefusesAnEmptyMessageWhichWouldLookLikeTheEnd) {
  const SocketPair pair = MakePair();

  EXPECT_THAT(SendMessage(pair.first.get(), ""), StatusIs(Reason::kInvalidArgument));
}

TEST(Socket, RefusesAMessageOverSixtyFourKibibytes) {
  const SocketPair pair = MakePair();

  EXPECT_THAT(SendMessage(pair.first.get(), std::string(64 * 1024, 'x')), IsOk());
  EXPECT_THAT(SendMessage(pair.first.get(), std::string(64 * 1024 + 1, 'x')),
              StatusIs(Reason::kInvalidArgument, HasSubstr("65537")));
}

TEST(Socket, SaysThatTheOtherSideHasGoneAndRaisesNoSignal) {
  SocketPair pair = MakePair();
  pair.second.reset();

  EXPECT_THAT(SendMessage(pair.first.get(), "x"), StatusIs(Reason::kServiceUnavailable));
}

TEST(Socket, ReceivesWhatWasSentBeforeTheOtherSideClosedAndThenItsEnd) {
  SocketPair pair = MakePair();
  ASSERT_THAT(SendMessage(pair.first.get(), "last words"), IsOk());
  pair.first.reset();

  const auto message = ReceiveMessage(pair.second.get());
  const auto end = ReceiveMessage(pair.second.get());

  ASSERT_THAT(message, IsOk());
  EXPECT_EQ(message->bytes, "last words");
  ASSERT_THAT(end, IsOk());
  EXPECT_TRUE(end->closed);
}

TEST(Socket, GivesUpWaitingAtTheTimeout) {
  const SocketPair pair = MakePair();

  EXPECT_THAT(ReceiveMessage(pair.second.get(), std::chrono::milliseconds(20)), StatusIs(Reason::kDeadlineExceeded));
}

TEST(Socket, RefusesAnOverlongMessageAndLeaksNoneOfItsDescriptors) {
  const SocketPair pair = MakePair();
  const UniqueFd null(open("/dev/null", O_RDONLY));
  const std::string bytes(100'000, 'x');
  iovec part{.iov_base = const_cast<char*>(bytes.data()), .iov_len = bytes.size()};
  alignas(cmsghdr) char control_buffer[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control_buffer;
  header.msg_controllen = sizeof(control_buffer);
  cmsghdr* const control = CMSG_FIRSTHDR(&header);
  control->cmsg_len = CMSG_LEN(sizeof(int));
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  const int fd = null.get();
  std::copy_n(reinterpret_cast<const unsigned char*>(&fd), sizeof(fd), CMSG_DATA(control));
  ASSERT_EQ(sendmsg(pair.first.get(), &header, 0), static_cast<ssize_t>(bytes.size()));
  const size_t before = OpenFdCount();

  EXPECT_THAT(ReceiveMessage(pair.second.get()), StatusIs(Reason::kProtocolError, HasSubstr("65536")));
  EXPECT_EQ(OpenFdCount(), before);
}

TEST(Socket, SaysThatDescriptorsWereLostAtTheLimitAndLeaksNone) {
  const SocketPair pair = MakePair();
  const UniqueFd null(open("/dev/null", O_RDONLY));
  const int fds[] = {null.get(), null.get(), null.get(), null.get()};
  ASSERT_THAT(SendMessage(pair.first.get(), "x", fds), IsOk());
  const size_t before = OpenFdCount();
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &old), 0);
  // The next free number is the limit's last: one descriptor fits, three vanish.
  const int next_free = dup(null.get());
  close(next_free);
  const rlimit low{.rlim_cur = static_cast<rlim_t>(next_free) + 1, .rlim_max = old.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);

  const auto message = ReceiveMessage(pair.second.get());

  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &old), 0);
  EXPECT_THAT(message, StatusIs(Reason::kProtocolError, HasSubstr("RLIMIT_NOFILE")));
  EXPECT_THAT(message, HasMetadata("fds_received", "1"));
  EXPECT_EQ(OpenFdCount(), before);
}

TEST(Socket, RaisesTheDescriptorLimitToTheHardOne) {
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &old), 0);
  const rlimit low{.rlim_cur = std::min<rlim_t>(old.rlim_max, 256), .rlim_max = old.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);

  EXPECT_EQ(RaiseFdLimit(), static_cast<int64_t>(old.rlim_max));

  rlimit now{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &now), 0);
  EXPECT_EQ(now.rlim_cur, old.rlim_max);
}

}  // namespace
}  // namespace weightbroker
