// Mode::kDaemon: an engine starts the service that it does not find, and leaves it behind.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "common/base/unique_fd.h"
#include "tests/integration/survival/started_service.h"
#include "tests/integration/survival/survival.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

int FirstOf(const cpu_set_t& processors) {
  int first = 0;
  while (!CPU_ISSET(first, &processors)) ++first;
  return first;
}

class DaemonTest : public ::testing::Test {
 protected:
  DaemonTest() : service_(folder_ / "s.sock") {
    std::filesystem::create_directories(folder_ / "models/small");
    CheckpointBuilder().Tensor("w", "BF16", {64, 64}).Write(folder_ / "models/small");
  }

  std::vector<std::string> Flags(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> flags = service_.EngineFlags("models:small", "models=" + (folder_ / "models"));
    flags.insert(flags.end(), more.begin(), more.end());
    return flags;
  }

  const TemporaryFolder folder_;
  StartedService service_;  // stopped before the folder goes
};

TEST_F(DaemonTest, TheServiceOutlivesTheEngineThatStartedIt) {
  const Finished first = RunProgram("engine", Flags());
  ASSERT_EQ(first.exit.code, 0) << first.errors;
  EXPECT_EQ(first.json["source"], "attached");
  const pid_t keeper = service_.Keeper();
  ASSERT_GT(keeper, 0);

  const Finished second = RunProgram("engine", Flags());

  ASSERT_EQ(second.exit.code, 0) << second.errors;
  EXPECT_EQ(second.json["fingerprint"], first.json["fingerprint"]);
  EXPECT_EQ(second.json["generation"], 1) << "nothing was loaded again";
  EXPECT_EQ(service_.Keeper(), keeper);
  EXPECT_EQ(service_.CountKeepers(), 1);
}

TEST_F(DaemonTest, TheServiceIsDetachedAndWritesToItsOwnLog) {
  const Finished engine = RunProgram("engine", Flags());
  ASSERT_EQ(engine.exit.code, 0) << engine.errors;
  const pid_t keeper = service_.Keeper();
  const std::string process = "/proc/" + std::to_string(keeper);

  EXPECT_EQ(getsid(keeper), keeper) << "it would get a terminal's signals";
  EXPECT_EQ(std::filesystem::read_symlink(process + "/fd/0"), "/dev/null");
  EXPECT_EQ(std::filesystem::read_symlink(process + "/fd/1"), service_.log_path());
  EXPECT_EQ(std::filesystem::read_symlink(process + "/fd/2"), service_.log_path());
  EXPECT_THAT(ReadFile(service_.log_path()), AllOf(HasSubstr("keeper.started"), HasSubstr("broker.ready")));
}

TEST_F(DaemonTest, TheServiceIsNotPinnedThoughTheEngineIs) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  if (CPU_COUNT(&before) < 2) GTEST_SKIP() << "there is but one processor";
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(FirstOf(before), &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  const Finished engine = RunProgram("engine", Flags());
  sched_setaffinity(0, sizeof(before), &before);
  ASSERT_EQ(engine.exit.code, 0) << engine.errors;

  cpu_set_t of_keeper;
  ASSERT_EQ(sched_getaffinity(service_.Keeper(), sizeof(of_keeper), &of_keeper), 0);

  EXPECT_GE(CPU_COUNT(&of_keeper), CPU_COUNT(&before));
}

TEST_F(DaemonTest, AServiceThatHasEndedIsStartedAgain) {
  ASSERT_EQ(RunProgram("engine", Flags()).exit.code, 0);
  const pid_t before = service_.Keeper();
  service_.Kill(SIGKILL);  // which leaves a socket behind that nobody listens on

  const Finished engine = RunProgram("engine", Flags({"--deadline_seconds", "30"}));

  EXPECT_EQ(engine.exit.code, 0) << engine.errors;
  EXPECT_NE(service_.Keeper(), before);
}

TEST_F(DaemonTest, SaysWhyAServiceRefusesToStart) {
  const Finished engine = RunProgram("engine", Flags({"--daemon_flag=--no_such_flag=1"}));

  EXPECT_EQ(engine.exit.code, 4);
  EXPECT_EQ(engine.json["reason"], "SERVICE_NOT_STARTED") << engine.errors;
  EXPECT_THAT(engine.errors,
              AllOf(HasSubstr("exit code 2"), HasSubstr("no_such_flag"), HasSubstr(service_.log_path())));
}

TEST_F(DaemonTest, SaysWhyAServiceEndsAtItsStart) {
  const UniqueFd taken(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(taken.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(taken.get(), 1), 0);
  ASSERT_EQ(getsockname(taken.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string metrics = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));

  const Finished engine =
      RunProgram("engine", service_.EngineFlags("models:small", "models=" + (folder_ / "models"), metrics));

  EXPECT_EQ(engine.exit.code, 4);
  EXPECT_EQ(engine.json["reason"], "SERVICE_NOT_STARTED") << engine.errors;
  EXPECT_THAT(engine.errors, AllOf(HasSubstr("ended soon after its start"), HasSubstr(metrics)));
}

TEST_F(DaemonTest, NamesAProgramThatIsNotThere) {
  const Finished engine = RunProgram("engine", Flags({"--daemon_program", "/no/such/weightbrokerd"}));

  EXPECT_EQ(engine.exit.code, 4);
  EXPECT_THAT(engine.errors, AllOf(HasSubstr("/no/such/weightbrokerd"), HasSubstr("SERVICE_NOT_STARTED")));
}

TEST_F(DaemonTest, WithoutItAnEngineThatFindsNoServiceSaysThatItIsUnavailable) {
  std::vector<std::string> flags = {"--socket",     folder_ / "s.sock", "--model",
                                    "models:small", "--torch_version",  "any"};
  EXPECT_EQ(RunProgram("engine", flags).exit.code, 4) << "the disk, its second choice, has no such root";
  flags.insert(flags.end(), {"--fallback", "fail"});
  EXPECT_EQ(RunProgram("engine", flags).exit.code, 4);
}

}  // namespace
}  // namespace weightbroker::testing
