#include "common/process/spawn.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::Not;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;

struct Pipe {
  UniqueFd read_end;
  UniqueFd write_end;

  Pipe() {
    int fds[2];
    EXPECT_EQ(pipe2(fds, O_CLOEXEC), 0);
    read_end.reset(fds[0]);
    write_end.reset(fds[1]);
  }

  std::string ReadAll() {
    write_end.reset();
    std::string text;
    char buffer[4096];
    for (ssize_t n; (n = read(read_end.get(), buffer, sizeof(buffer))) > 0;)
      text.append(buffer, static_cast<size_t>(n));
    return text;
  }
};

absl::StatusOr<ChildProcess> Shell(const std::string& script, std::vector<FdMapping> fds = {}) {
  return Spawn({.path = "/bin/sh", .arguments = {"-c", script}, .fds = std::move(fds)});
}

TEST(Spawn, GivesTheExitCode) {
  auto child = Shell("exit 7");
  ASSERT_THAT(child, IsOk());

  auto exit = child->Wait(seconds(10));

  ASSERT_THAT(exit, IsOk());
  EXPECT_EQ(exit->shell_code(), 7);
  EXPECT_EQ(exit->ToString(), "exit code 7");
  EXPECT_FALSE(exit->success());
}

TEST(Spawn, NamesTheSignalThatEndedTheChild) {
  auto child = Shell("kill -SEGV $$");
  ASSERT_THAT(child, IsOk());

  auto exit = child->Wait(seconds(10));

  ASSERT_THAT(exit, IsOk());
  EXPECT_EQ(exit->shell_code(), 128 + SIGSEGV);
  EXPECT_EQ(exit->ToString(), "killed by SIGSEGV");
}

TEST(Spawn, NamesAProgramThatIsNotThere) {
  auto child = Spawn({.path = "/nonexistent/program", .arguments = {}, .fds = {}});

  EXPECT_THAT(child, StatusIs(Reason::kSystemError, HasSubstr("/nonexistent/program")));
  EXPECT_THAT(child, HasMetadata("errno", "ENOENT"));
}

TEST(Spawn, SwapsTwoDescriptors) {
  Pipe first;
  Pipe second;
  const int a = first.write_end.get();
  const int b = second.write_end.get();
  auto child = Shell("echo to-b >&" + std::to_string(a) + "; echo to-a >&" + std::to_string(b), {{a, b}, {b, a}});
  ASSERT_THAT(child, IsOk());
  ASSERT_THAT(child->Wait(seconds(10)), IsOk());

  EXPECT_EQ(first.ReadAll(), "to-a\n");
  EXPECT_EQ(second.ReadAll(), "to-b\n");
}

TEST(Spawn, KeepsADescriptorWhoseNumberStaysTheSame) {
  Pipe pipe;
  const int fd = pipe.write_end.get();
  auto child = Shell("echo here >&" + std::to_string(fd), {{fd, fd}});
  ASSERT_THAT(child, IsOk());
  ASSERT_THAT(child->Wait(seconds(10)), IsOk());

  EXPECT_EQ(pipe.ReadAll(), "here\n");
}

TEST(Spawn, GivesTheChildNoOtherDescriptorEvenOneThatIsNotCloseOnExec) {
  Pipe pipe;
  UniqueFd low(open("/dev/null", O_RDONLY));      // inheritable, below the one mapped
  UniqueFd high(fcntl(low.get(), F_DUPFD, 500));  // inheritable, above it
  auto child = Shell("exec ls /proc/self/fd >&9", {{pipe.write_end.get(), 9}});
  ASSERT_THAT(child, IsOk());
  ASSERT_THAT(child->Wait(seconds(10)), IsOk());

  // 3 is the folder that ls itself has open.
  EXPECT_EQ(pipe.ReadAll(), "0\n1\n2\n3\n9\n");
}

// The soft limit of this process, for as long as this lives.
class FdLimit {
 public:
  explicit FdLimit(rlim_t limit) {
    getrlimit(RLIMIT_NOFILE, &before_);
    rlimit lowered = before_;
    lowered.rlim_cur = limit;
    setrlimit(RLIMIT_NOFILE, &lowered);
  }
  ~FdLimit() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_ = {};
};

TEST(Spawn, NeedsNoHigherNumbersThanASmallLimitOfOpenFilesAllows) {
  Pipe pipe;
  const FdLimit limit(64);
  auto child = Shell("echo here >&4", {{pipe.write_end.get(), 4}});
  ASSERT_THAT(child, IsOk());
  ASSERT_THAT(child->Wait(seconds(10)), IsOk());

  EXPECT_EQ(pipe.ReadAll(), "here\n");
}

TEST(Spawn, NamesALimitOfOpenFilesThatIsTooLow) {
  const FdLimit limit(20);
  EXPECT_THAT(Shell("true", {{1, 40}}),
              StatusIs(Reason::kSystemError, HasSubstr("a number from 41 on is needed and the limit of open files, "
                                                       "RLIMIT_NOFILE, is 20: raise it")));
}

TEST(Spawn, RefusesOneChildDescriptorMappedTwice) {
  EXPECT_THAT(Shell("true", {{1, 5}, {2, 5}}), StatusIs(Reason::kInvalidArgument, HasSubstr("descriptor 5")));
}

TEST(Spawn, RefusesADescriptorThatIsNotOpen) {
  EXPECT_THAT(Shell("true", {{987654, 5}}), StatusIs(Reason::kSystemError, HasSubstr("descriptor 987654")));
}

TEST(Spawn, UnblocksSignalsThatItsParentBlocksOrIgnores) {
  sigset_t blocked;
  sigset_t before;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &blocked, &before);
  const auto handler = signal(SIGTERM, SIG_IGN);
  auto child = Spawn({.path = "/bin/sleep", .arguments = {"60"}, .fds = {}});
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  signal(SIGTERM, handler);
  ASSERT_THAT(child, IsOk());

  ASSERT_THAT(child->Kill(SIGTERM), IsOk());

  auto exit = child->Wait(seconds(10));
  ASSERT_THAT(exit, IsOk());
  EXPECT_EQ(exit->signal, SIGTERM);
}

TEST(Spawn, PutsTheChildIntoAProcessGroupOfItsOwn) {
  auto child = Spawn({.path = "/bin/sleep", .arguments = {"60"}, .fds = {}});
  ASSERT_THAT(child, IsOk());

  EXPECT_EQ(getpgid(child->pid()), child->pid());
}

TEST(ChildProcess, SaysThatItIsStillRunning) {
  auto child = Spawn({.path = "/bin/sleep", .arguments = {"60"}, .fds = {}});
  ASSERT_THAT(child, IsOk());

  EXPECT_THAT(child->Wait(milliseconds(0)), StatusIs(Reason::kDeadlineExceeded));
  EXPECT_THAT(child->Wait(milliseconds(20)), StatusIs(Reason::kDeadlineExceeded, HasSubstr("20 ms")));
}

TEST(ChildProcess, HasADescriptorThatBecomesReadableWhenItEnds) {
  auto child = Shell("exit 0");
  ASSERT_THAT(child, IsOk());

  pollfd ended = {.fd = child->pidfd(), .events = POLLIN, .revents = 0};

  EXPECT_EQ(poll(&ended, 1, 10'000), 1);
}

TEST(ChildProcess, GivesTheSameAnswerWhenWaitedForTwice) {
  auto child = Shell("exit 3");
  ASSERT_THAT(child, IsOk());
  ASSERT_THAT(child->Wait(seconds(10)), IsOk());

  auto exit = child->Wait();

  ASSERT_THAT(exit, IsOk());
  EXPECT_EQ(exit->code, 3);
  EXPECT_THAT(child->Kill(SIGKILL), IsOk());
}

TEST(ChildProcess, LeavesNoProcessAndNoZombieBehind) {
  pid_t pid = -1;
  {
    auto child = Spawn({.path = "/bin/sleep", .arguments = {"60"}, .fds = {}});
    ASSERT_THAT(child, IsOk());
    pid = child->pid();
    ChildProcess moved = *std::move(child);
    EXPECT_EQ(moved.pid(), pid);
  }
  EXPECT_EQ(waitpid(pid, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST(ChildProcess, LivesOnOnceReleased) {
  auto child = Spawn({.path = "/bin/sleep", .arguments = {"60"}, .fds = {}});
  ASSERT_THAT(child, IsOk());
  const pid_t pid = child->pid();
  const UniqueFd pidfd = std::move(*child).Release();
  { ChildProcess ended = *std::move(child); }
  EXPECT_EQ(waitpid(pid, nullptr, WNOHANG), 0);
  EXPECT_TRUE(pidfd.valid());
  kill(pid, SIGKILL);
  EXPECT_EQ(waitpid(pid, nullptr, 0), pid);
}

TEST(PathBesideThisProgram, IsInTheSameFolder) {
  auto path = PathBesideThisProgram("spawn_test");

  ASSERT_THAT(path, IsOk());
  EXPECT_EQ(access(path->c_str(), X_OK), 0) << *path;
  EXPECT_THAT(*path, Not(HasSubstr("(deleted)")));
}

}  // namespace
}  // namespace weightbroker
