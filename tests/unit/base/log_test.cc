#include "common/base/log.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <climits>
#include <csignal>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "common/base/unique_fd.h"
#include "tests/unit/endpoint/socket_client.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Lt;
using ::testing::Not;
using ::testing::SizeIs;

TEST(Log, QuotesValuesSoThatAHostileNameCannotForgeALine) {
  const std::string line = FormatLogLine(LogLevel::kInfo, "load.failed", {{"file", "a\nlevel=error event=\"x\""}});

  EXPECT_THAT(line, HasSubstr("file=\"a\\nlevel=error event=\\\"x\\\"\""));
  EXPECT_THAT(line, Not(HasSubstr("\n")));
}

TEST(Log, LeavesPlainValuesPlain) {
  EXPECT_THAT(FormatLogLine(LogLevel::kWarning, "a.b", {{"bytes", "12"}}), HasSubstr("level=warning"));
  EXPECT_THAT(FormatLogLine(LogLevel::kWarning, "a.b", {{"bytes", "12"}}), HasSubstr("event=a.b bytes=12"));
  EXPECT_THAT(FormatLogLine(LogLevel::kInfo, "a.b", {{"file", "l\xc3\xa9"}}), EndsWith("file=l\xc3\xa9"));
}

TEST(Log, EscapesBytesThatAreNotUtf8) {
  EXPECT_THAT(FormatLogLine(LogLevel::kInfo, "a.b", {{"file", "x\xc3"}}), EndsWith("file=\"x\\xc3\""));
}

TEST(Log, CutsALongValueAndSaysHowMuchIsLeft) {
  EXPECT_THAT(FormatLogLine(LogLevel::kInfo, "a.b", {{"message", std::string(100'000, 'x')}, {"pid", "1"}}),
              AllOf(SizeIs(Lt(2'000)), HasSubstr(" more bytes)\" pid=1")));
}

TEST(Log, LeavesOutFieldsThatWouldMakeALineTooLongForOneWrite) {
  const LogFields fields(10, {"message", std::string(1'000, '\x01')});
  EXPECT_THAT(FormatLogLine(LogLevel::kInfo, "a.b", fields),
              AllOf(SizeIs(Lt(PIPE_BUF - 64)), EndsWith(" fields_left_out=8")));
}

// Has this process's stderr be another file, for as long as this lives.
class StderrIs {
 public:
  explicit StderrIs(int fd) : before_(dup(STDERR_FILENO)) { dup2(fd, STDERR_FILENO); }
  ~StderrIs() { dup2(before_.get(), STDERR_FILENO); }

 private:
  const UniqueFd before_;
};

std::vector<std::string> ReadLines(int fd) {
  std::string text;
  char buffer[65536];
  for (ssize_t n = 0; (n = read(fd, buffer, sizeof(buffer))) > 0;) text.append(buffer, static_cast<size_t>(n));
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

struct Reader {
  UniqueFd read_end;
  UniqueFd write_end;
};

Reader MakePipe() {
  int fds[2];
  EXPECT_EQ(pipe2(fds, O_CLOEXEC), 0);
  fcntl(fds[0], F_SETFL, O_NONBLOCK);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

Reader MakeStreamSocket() {
  int fds[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  fcntl(fds[0], F_SETFL, O_NONBLOCK);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

void LogLines(int count) {
  for (int i = 0; i < count; ++i)
    Log(LogLevel::kError, "test.line", {{"padding", std::string(900, 'x')}, {"end", "1"}});
}

class LogToAReader : public ::testing::TestWithParam<Reader (*)()> {};

TEST_P(LogToAReader, NeverWaitsForOneWhoDoesNotReadAndSaysInTheNextLineWhatWasDropped) {
  const Reader reader = GetParam()();
  const StderrIs stderr_is(reader.write_end.get());
  const int64_t dropped_before = DroppedLogLines();
  constexpr int kLines = 2'000;
  LogLines(kLines);
  const int64_t dropped = DroppedLogLines() - dropped_before;
  EXPECT_GT(dropped, 0);
  const std::vector<std::string> written = ReadLines(reader.read_end.get());
  EXPECT_EQ(static_cast<int64_t>(written.size()), kLines - dropped);
  EXPECT_THAT(written, Each(AllOf(HasSubstr("event=test.line padding=xxx"), EndsWith(" end=1"))));

  LogLines(2);
  const std::vector<std::string> after = ReadLines(reader.read_end.get());
  ASSERT_THAT(after, SizeIs(2));
  EXPECT_THAT(after[0], EndsWith(" end=1 dropped_lines=" + std::to_string(dropped)));
  EXPECT_THAT(after[1], EndsWith(" end=1"));
  EXPECT_EQ(DroppedLogLines() - dropped_before, dropped);
}

TEST_P(LogToAReader, KeepsLinesOfManyThreadsWhole) {
  const Reader reader = GetParam()();
  const StderrIs stderr_is(reader.write_end.get());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([] { LogLines(200); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(ReadLines(reader.read_end.get()),
              Each(AllOf(HasSubstr("event=test.line padding=xxx"), HasSubstr(" end=1"))));
}

TEST_P(LogToAReader, LeavesTheFlagsOfStderrAlone) {
  const Reader reader = GetParam()();
  const StderrIs stderr_is(reader.write_end.get());
  LogLines(1);
  EXPECT_EQ(fcntl(STDERR_FILENO, F_GETFL) & O_NONBLOCK, 0);
}

TEST_P(LogToAReader, CountsWhatItSaysToNobody) {
  signal(SIGPIPE, SIG_IGN);
  Reader reader = GetParam()();
  const StderrIs stderr_is(reader.write_end.get());
  reader.read_end.reset();
  const int64_t dropped_before = DroppedLogLines();
  LogLines(3);
  EXPECT_EQ(DroppedLogLines() - dropped_before, 3);
}

INSTANTIATE_TEST_SUITE_P(EveryKind, LogToAReader, ::testing::Values(&MakePipe, &MakeStreamSocket));

TEST(Log, WaitsForNobodyThoughThePipeIsAnotherUsersWhichCannotBeOpenedAnew) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  const Reader reader = MakePipe();
  const StderrIs stderr_is(reader.write_end.get());
  EXPECT_EQ(testing::RunAsUser(testing::kNobody,
                               [] {
                                 LogLines(2'000);
                                 return DroppedLogLines() > 0 && DroppedLogLines() < 2'000 ? 0 : 1;
                               }),
            0);
  EXPECT_THAT(ReadLines(reader.read_end.get()), Each(EndsWith(" end=1")));
}

TEST(Log, WritesEveryLineToAFile) {
  const UniqueFd file(open("/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  const StderrIs stderr_is(file.get());
  LogLines(2'000);
  lseek(file.get(), 0, SEEK_SET);
  EXPECT_THAT(ReadLines(file.get()), SizeIs(2'000));
}

}  // namespace
}  // namespace weightbroker
