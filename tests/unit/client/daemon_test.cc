#include "client/src/daemon.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <chrono>
#include <string>

#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker::client {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::ReadFile;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::TemporaryFolder;
using ::weightbroker::testing::WriteFile;

constexpr milliseconds kPatience(30'000);

class DaemonTest : public ::testing::Test {
 protected:
  // A service that does what a shell script says.
  Daemon Scripted(const std::string& script) {
    const std::string program = folder_ / "program";
    WriteFile(program, "#!/bin/sh\n" + script);
    chmod(program.c_str(), 0700);
    return Daemon({.program = program, .flags = {"--given=1"}}, {folder_ / "socket", false});
  }

  const TemporaryFolder folder_;
};

TEST_F(DaemonTest, NamesAProgramThatIsNotThere) {
  const Daemon daemon({.program = "/no/such/weightbrokerd"}, {folder_ / "socket", false});

  EXPECT_THAT(daemon.Start(kPatience).status(),
              AllOf(StatusIs(Reason::kServiceNotStarted, AllOf(HasSubstr("/no/such/weightbrokerd"),
                                                               HasSubstr("No such file"), HasSubstr("WEIGHTBROKERD"))),
                    HasMetadata("program", "/no/such/weightbrokerd")));
}

TEST_F(DaemonTest, TakesTheProgramFromTheEnvironmentIfNoneIsGiven) {
  setenv("WEIGHTBROKERD", "/no/such/program", 1);
  const Daemon daemon({}, {folder_ / "socket", false});

  EXPECT_THAT(daemon.Start(kPatience).status(), HasMetadata("program", "/no/such/program"));
  unsetenv("WEIGHTBROKERD");
}

TEST_F(DaemonTest, GivesTheLastLinesOfTheLogOfOneThatEnds) {
  const Daemon daemon = Scripted("echo first >&2; for i in 1 2 3 4 5 6 7 8; do echo line $i; done; exit 7");
  WriteFile(folder_ / "socket.log", "of another one\n");

  EXPECT_THAT(daemon.Start(kPatience).status(),
              StatusIs(Reason::kServiceNotStarted,
                       AllOf(HasSubstr("exit code 7"), HasSubstr("line 1 | line 2"), HasSubstr("line 8"),
                             Not(HasSubstr("first")), Not(HasSubstr("of another one")))));
  EXPECT_THAT(ReadFile(folder_ / "socket.log"), AllOf(HasSubstr("of another one"), HasSubstr("first")));
}

TEST_F(DaemonTest, GivesTheServiceItsSocketAndFlags) {
  const Daemon daemon = Scripted("echo \"$@\"; exit 7");

  EXPECT_THAT(
      daemon.Start(kPatience).status(),
      StatusIs(Reason::kServiceNotStarted, HasSubstr("--detach --socket=" + (folder_ / "socket") + " --given=1")));
}

TEST_F(DaemonTest, GivesUpOnOneThatDoesNotComeUpInTime) {
  const Daemon daemon = Scripted("exec sleep 600");

  EXPECT_THAT(daemon.Start(milliseconds(100)).status(),
              StatusIs(Reason::kServiceNotStarted, HasSubstr("did not come up in time")));
}

TEST_F(DaemonTest, SaysThatTheLogCannotBeWritten) {
  const Daemon daemon({.program = "/bin/true", .log_path = "/no/such/folder/log"}, {folder_ / "socket", false});

  EXPECT_THAT(daemon.Start(kPatience).status(), StatusIs(Reason::kServiceNotStarted, HasSubstr("/no/such/folder/log")));
}

TEST_F(DaemonTest, BelievesOneThatSaysThatAnotherHasTheSocketOnlyIfSomebodyListens) {
  const Daemon daemon = Scripted("echo taken; exit 4");

  EXPECT_THAT(daemon.Start(milliseconds(200)).status(), StatusIs(Reason::kServiceNotStarted, HasSubstr("taken")));
}

}  // namespace
}  // namespace weightbroker::client
