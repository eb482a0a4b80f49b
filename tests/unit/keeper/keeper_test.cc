// weightbrokerd as a process, with a shell script for a broker.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <fstream>
#include <optional>
#include <sstream>
#include <thread>

#include "common/process/spawn.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/endpoint/socket_client.h"
#include "tests/unit/endpoint/temp_folder.h"

namespace weightbroker {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::weightbroker::testing::Connect;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::TempFolder;

constexpr char kKeeper[] = WEIGHTBROKER_BIN_DIR "/weightbrokerd";

class WeightbrokerdTest : public ::testing::Test {
 protected:
  // A broker whose standard output and error are the keeper's: `output_`.
  void WriteBroker(const std::string& script) {
    std::ofstream(broker_) << "#!/bin/sh\n" << script << "\n";
    ASSERT_EQ(chmod(broker_.c_str(), 0755), 0);
  }

  void Start(std::vector<std::string> more = {}) {
    std::vector<std::string> arguments = {"--socket=" + socket_, "--broker_path=" + broker_};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const UniqueFd output(open(output_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
    auto keeper = Spawn({.path = kKeeper,
                         .arguments = arguments,
                         .fds = {{output.get(), STDOUT_FILENO}, {output.get(), STDERR_FILENO}}});
    ASSERT_THAT(keeper, IsOk());
    keeper_.emplace(*std::move(keeper));
  }

  int ExitCode() {
    const auto exit = keeper_->Wait(seconds(20));
    EXPECT_THAT(exit, IsOk()) << Output();
    return exit.ok() ? exit->shell_code() : -1;
  }

  std::string Output() const {
    std::ifstream stream(output_);
    std::stringstream text;
    text << stream.rdbuf();
    return text.str();
  }

  bool WaitForOutput(const std::string& text) const {
    for (int i = 0; i < 2000; ++i) {
      if (Output().find(text) != std::string::npos) return true;
      std::this_thread::sleep_for(milliseconds(5));
    }
    return false;
  }

  TempFolder folder_;
  const std::string socket_ = folder_ / "s";
  const std::string broker_ = folder_ / "broker";
  const std::string output_ = folder_ / "output";
  std::optional<ChildProcess> keeper_;
};

TEST_F(WeightbrokerdTest, GivesTheBrokerItsOwnFlagsAndTheListeningSocketAndNothingElse) {
  WriteBroker(
      "for a in \"$@\"; do echo \"arg $a\"; done\n"
      "[ -S /proc/self/fd/3 ] && echo socket-on-3\n"
      "exec ls /proc/self/fd");
  Start({"--log_level=error", "--allowed_uids", "1,2"});

  EXPECT_EQ(ExitCode(), 0);
  EXPECT_THAT(Output(), AllOf(HasSubstr("arg --socket=" + socket_ + "\n"), HasSubstr("arg --log_level=error\n"),
                              HasSubstr("arg --allowed_uids\narg 1,2\narg --listen_fd=3\n"), HasSubstr("socket-on-3\n"),
                              HasSubstr("0\n1\n2\n3\n4\n"), Not(HasSubstr("5\n"))));
}

TEST_F(WeightbrokerdTest, HoldsTheSocketWhileTheBrokerRunsAndRemovesItAfterwards) {
  WriteBroker("echo up; read forever < " + (folder_ / "fifo"));
  ASSERT_EQ(mkfifo((folder_ / "fifo").c_str(), 0600), 0);
  Start();
  ASSERT_TRUE(WaitForOutput("up"));

  EXPECT_TRUE(Connect(socket_).valid());  // it queues for the broker
  std::ofstream(folder_ / "fifo") << "end\n";

  EXPECT_EQ(ExitCode(), 0);
  EXPECT_FALSE(Connect(socket_).valid());
  EXPECT_NE(access(socket_.c_str(), F_OK), 0);
}

TEST_F(WeightbrokerdTest, ExitsWithTheBrokersCode) {
  WriteBroker("exit 7");
  Start();
  EXPECT_EQ(ExitCode(), 7);
  EXPECT_THAT(Output(), HasSubstr("event=broker.ended status=\"exit code 7\""));
}

TEST_F(WeightbrokerdTest, ExitsWith128AndTheSignalThatKilledTheBroker) {
  WriteBroker("kill -KILL $$");
  Start();
  EXPECT_EQ(ExitCode(), 128 + SIGKILL);
  EXPECT_THAT(Output(), HasSubstr("killed by SIGKILL"));
}

TEST_F(WeightbrokerdTest, PassesATerminationOnAndThenASecondOne) {
  WriteBroker(
      "trap 'echo first; trap \"echo second; exit 9\" TERM' TERM\n"
      "echo up; while :; do sleep 0.02; done");
  Start();
  ASSERT_TRUE(WaitForOutput("up\n"));

  ASSERT_THAT(keeper_->Kill(SIGTERM), IsOk());
  ASSERT_TRUE(WaitForOutput("first\n"));
  EXPECT_FALSE(keeper_->Wait(milliseconds(50)).ok());
  ASSERT_THAT(keeper_->Kill(SIGTERM), IsOk());

  EXPECT_EQ(ExitCode(), 9);
  EXPECT_THAT(Output(), HasSubstr("second\n"));
}

TEST_F(WeightbrokerdTest, LeavesNoBrokerBehindWhenItsTerminalGoes) {
  WriteBroker(
      "trap 'echo int; exit 3' INT; trap 'echo term; exit 4' TERM\n"
      "echo up; while :; do sleep 0.02; done");
  for (const auto& [signal, code] : {std::pair{SIGINT, 3}, {SIGHUP, 4}, {SIGQUIT, 4}}) {
    unlink(output_.c_str());
    Start();
    ASSERT_TRUE(WaitForOutput("up\n"));
    ASSERT_THAT(keeper_->Kill(signal), IsOk());
    EXPECT_EQ(ExitCode(), code);
  }
}

TEST_F(WeightbrokerdTest, RefusesASocketInUseAndLeavesTheFirstUndisturbed) {
  WriteBroker("echo up; trap 'exit 0' TERM; while :; do sleep 0.02; done");
  Start();
  ASSERT_TRUE(WaitForOutput("up\n"));
  ChildProcess first = *std::move(keeper_);
  keeper_.reset();

  Start();

  EXPECT_EQ(ExitCode(), 1);
  EXPECT_THAT(Output(), HasSubstr("weightbrokerd: a service is already running on " + socket_ + " (process " +
                                  std::to_string(first.pid()) + ")"));
  EXPECT_TRUE(Connect(socket_).valid());
  EXPECT_FALSE(first.Wait(milliseconds(0)).ok());
}

TEST_F(WeightbrokerdTest, SaysThatTheBrokerCannotBeStarted) {
  WriteBroker("");
  std::ofstream(broker_) << "#!/nonexistent/interpreter\n";
  Start();
  EXPECT_EQ(ExitCode(), 1);
  EXPECT_THAT(Output(), HasSubstr("weightbrokerd: cannot start " + broker_ + ": No such file or directory\n"));
  EXPECT_NE(access(socket_.c_str(), F_OK), 0);
}

TEST_F(WeightbrokerdTest, ChecksTheConfigurationWithoutTakingTheSocket) {
  WriteBroker("echo must not run");
  Start({"--check_config", "--loader_path=/bin/sh"});
  EXPECT_EQ(ExitCode(), 0);
  EXPECT_THAT(Output(), HasSubstr("the configuration is valid"));
  EXPECT_NE(access((socket_ + ".lock").c_str(), F_OK), 0);

  Start({"--check_config", "--memory_limit=lots"});
  EXPECT_EQ(ExitCode(), 2);
  EXPECT_THAT(Output(), AllOf(HasSubstr("--memory_limit: \"lots\""), Not(HasSubstr("must not run"))));
}

TEST_F(WeightbrokerdTest, LinksNeitherGrpcNorProtobufNorCuda) {
  const UniqueFd output(open(output_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  auto ldd = Spawn({.path = "/usr/bin/ldd", .arguments = {kKeeper}, .fds = {{output.get(), STDOUT_FILENO}}});
  ASSERT_THAT(ldd, IsOk());
  ASSERT_THAT(ldd->Wait(seconds(20)), IsOk());

  EXPECT_THAT(Output(), HasSubstr("libc.so"));
  for (const char* library : {"grpc", "protobuf", "cuda"}) EXPECT_THAT(Output(), Not(HasSubstr(library)));
}

}  // namespace
}  // namespace weightbroker
