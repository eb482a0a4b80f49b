// A real keeper that replaces its own program while it keeps everything.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/integration/keeper/harness.h"

namespace weightbroker {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using testing::ConnectTo;
using testing::Eventually;
using testing::FakeBrokerHandle;
using ::testing::HasSubstr;
using testing::IsRunning;
using testing::KeeperHarness;
using ::testing::SizeIs;

class KeeperUpgradeTest : public ::testing::Test {
 protected:
  // A keeper whose program is a copy, so that a test may replace it.
  void StartKeeper(const std::vector<std::string>& arguments = {}) {
    fs::copy_file(WEIGHTBROKER_BIN_DIR "/weightbrokerd", program());
    harness_.StartKeeper(arguments, "", program());
  }
  std::string program() const { return harness_.Path("weightbrokerd"); }

  // As an installer does: the old file goes, another takes its name.
  void ReplaceProgram(const std::string& by) const {
    fs::copy_file(by, program() + ".new");
    fs::rename(program() + ".new", program());
  }

  void Upgrade() {
    ++upgrades_;
    kill(harness_.keeper_pid(), SIGUSR2);
    ASSERT_TRUE(harness_.WaitForLog("event=keeper.resumed", upgrades_));
  }

  KeeperHarness harness_;
  int upgrades_ = 0;
};

TEST_F(KeeperUpgradeTest, KeepsEntriesBrokerSocketAndLockAndNobodyNotices) {
  StartKeeper({"--broker_ping_interval=20ms", "--broker_ping_timeout=2s"});
  FakeBrokerHandle broker = harness_.NextBroker();
  EXPECT_EQ(broker.Ask("put a value 300"), "ok");
  EXPECT_EQ(broker.Ask("put b other 2"), "ok");
  const int fds = harness_.KeeperFds();
  const pid_t keeper = harness_.keeper_pid();
  for (int i = 0; i < 20; ++i) {
    ReplaceProgram(WEIGHTBROKER_BIN_DIR "/weightbrokerd");
    Upgrade();
  }
  EXPECT_TRUE(harness_.NoBrokerWithin(milliseconds(2'200)));  // pings are answered as before
  EXPECT_TRUE(IsRunning(broker.pid()));
  EXPECT_EQ(harness_.KeeperFds(), fds);
  EXPECT_EQ(fs::read_symlink("/proc/" + std::to_string(keeper) + "/exe").string(), program());
  EXPECT_TRUE(ConnectTo(harness_.socket(), SOCK_STREAM).valid());
  EXPECT_EQ(broker.Ask("put c new 1"), "ok");
  broker.Kill();
  EXPECT_EQ(harness_.NextBroker().greeting(), "ready a=value:300 b=other:2 c=new:1");
  EXPECT_EQ(harness_.StopKeeper(), 0);
  EXPECT_FALSE(fs::exists(harness_.socket()));
}

TEST_F(KeeperUpgradeTest, KeepsTheLockSoThatNoOtherTakesTheSocket) {
  StartKeeper();
  harness_.NextBroker();
  Upgrade();
  auto second =
      Spawn({.path = WEIGHTBROKER_BIN_DIR "/weightbrokerd", .arguments = {"--socket=" + harness_.socket()}, .fds = {}});
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(second->Wait(testing::kPatience)->code, 4);
}

TEST_F(KeeperUpgradeTest, KeepsLoadersAndTellsTheirEnd) {
  StartKeeper();
  FakeBrokerHandle broker = harness_.NextBroker();
  const pid_t loader = std::stoi(broker.Ask("spawn --stubborn"));
  Upgrade();
  EXPECT_TRUE(IsRunning(loader));
  kill(loader, SIGKILL);
  EXPECT_EQ(broker.Ask("exited"), std::to_string(loader) + " 9");
  EXPECT_THAT(harness_.KeeperChildren(), SizeIs(1));
}

TEST_F(KeeperUpgradeTest, WaitsUntilAHalfEntryIsWholeOrItsBrokerGone) {
  StartKeeper();
  FakeBrokerHandle broker = harness_.NextBroker();
  EXPECT_EQ(broker.Ask("half a"), "ok");
  std::this_thread::sleep_for(milliseconds(50));
  kill(harness_.keeper_pid(), SIGUSR2);
  std::this_thread::sleep_for(milliseconds(200));
  EXPECT_EQ(harness_.CountInLog("event=keeper.upgrading"), 0);
  broker.Kill();
  EXPECT_TRUE(harness_.WaitForLog("event=keeper.resumed"));
  EXPECT_EQ(harness_.NextBroker().greeting(), "ready ");
}

TEST_F(KeeperUpgradeTest, StaysWhatItIsWhenTheNewProgramCannotTakeOver) {
  StartKeeper();
  FakeBrokerHandle broker = harness_.NextBroker();
  EXPECT_EQ(broker.Ask("put a value 1"), "ok");
  int failures = 0;
  const auto expect_failure = [&] {
    kill(harness_.keeper_pid(), SIGUSR2);
    EXPECT_TRUE(harness_.WaitForLog("event=keeper.upgrade_failed", ++failures));
    EXPECT_EQ(broker.Ask("put a value 1"), "ok");
  };
  ReplaceProgram("/bin/false");
  expect_failure();
  EXPECT_THAT(harness_.Log(), HasSubstr("cannot take over: exit code 1"));
  std::ofstream(program() + ".new") << "not a program";
  fs::rename(program() + ".new", program());
  expect_failure();
  fs::remove(program());
  expect_failure();
  EXPECT_EQ(harness_.CountInLog("event=keeper.resumed"), 0);
  ReplaceProgram(WEIGHTBROKER_BIN_DIR "/weightbrokerd");
  Upgrade();
  broker.Kill();
  EXPECT_EQ(harness_.NextBroker().greeting(), "ready a=value:1");
}

TEST_F(KeeperUpgradeTest, LeavesNoneOfItsDescriptorsToTheBrokersAfter) {
  StartKeeper();
  FakeBrokerHandle broker = harness_.NextBroker();
  const auto fds_of = [](pid_t pid) {
    return std::distance(fs::directory_iterator("/proc/" + std::to_string(pid) + "/fd"), fs::directory_iterator());
  };
  const auto fds = fds_of(broker.pid());
  Upgrade();
  broker.Kill();
  EXPECT_EQ(fds_of(harness_.NextBroker().pid()), fds);
}

}  // namespace
}  // namespace weightbroker
