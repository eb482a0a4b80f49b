// A real keeper under a service manager that keeps its descriptors over its death.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/integration/keeper/harness.h"
#include "tests/unit/keeper/fake_service_manager.h"

namespace weightbroker {
namespace {

using testing::ConnectTo;
using testing::Eventually;
using testing::FakeBrokerHandle;
using testing::FakeServiceManager;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::KeeperHarness;
using ::testing::Not;

class KeeperUnderServiceManagerTest : public ::testing::Test {
 protected:
  KeeperUnderServiceManagerTest() { setenv("NOTIFY_SOCKET", systemd_.path().c_str(), 1); }
  ~KeeperUnderServiceManagerTest() override {
    for (const char* name : {"NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID", "WATCHDOG_USEC"}) {
      unsetenv(name);
    }
  }

  // Starts the keeper as the service manager does: with what it has kept, from descriptor 3 on. LISTEN_PID must be the
  // keeper's own, so a shell sets it and becomes the keeper.
  void RestartKeeper(const std::string& broker_flags = "") {
    const std::vector<NamedFd> kept = systemd_.HandOver();
    std::string names;
    SpawnOptions options;
    for (size_t i = 0; i < kept.size(); ++i) {
      names += (i == 0 ? "" : ":") + kept[i].name;
      options.fds.push_back({kept[i].fd.get(), static_cast<int>(3 + i)});
    }
    const UniqueFd log(open(harness_.Path("log").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
    options.fds.push_back({log.get(), 2});
    options.path = "/bin/sh";
    const std::string command = "LISTEN_PID=$$ LISTEN_FDS=" + std::to_string(kept.size()) + " LISTEN_FDNAMES='" +
                                names + "' exec " WEIGHTBROKER_BIN_DIR "/weightbrokerd --socket=" + harness_.socket() +
                                " --broker_path=" WEIGHTBROKER_BIN_DIR "/weightbroker-fake-broker" +
                                " --loader_path=" WEIGHTBROKER_BIN_DIR "/weightbroker-fake-loader";
    harness_.SetBrokerFlags(broker_flags);
    options.arguments = {"-c", command};
    auto child = Spawn(options);
    ASSERT_TRUE(child.ok()) << child.status();
    keeper_.emplace(*std::move(child));
  }

  // Its SIGKILL, and that of all its children, as a service manager does to what is left of a service.
  void KillService(const FakeBrokerHandle& broker) {
    keeper_->Kill(SIGKILL).IgnoreError();
    keeper_->Wait(testing::kPatience).status().IgnoreError();
    broker.Kill();
    EXPECT_TRUE(broker.WaitUntilGone());
  }

  FakeServiceManager systemd_;
  KeeperHarness harness_;
  std::optional<ChildProcess> keeper_;
};

TEST_F(KeeperUnderServiceManagerTest, SaysThatItIsReadyOnlyWhenItsBrokerIs) {
  RestartKeeper("--unready");
  FakeBrokerHandle broker = harness_.NextBroker();
  EXPECT_EQ(broker.greeting(), "unready ");
  EXPECT_FALSE(systemd_.WasTold("READY=1"));
  EXPECT_EQ(broker.Ask("ready"), "ok");
  EXPECT_TRUE(Eventually([&] { return systemd_.WasTold("READY=1"); }));
}

TEST_F(KeeperUnderServiceManagerTest, LosesNoEntryToItsOwnSigkill) {
  RestartKeeper();
  FakeBrokerHandle broker = harness_.NextBroker();
  EXPECT_EQ(broker.Ask("put a value 3"), "ok");
  EXPECT_EQ(broker.Ask("put b old 1"), "ok");
  EXPECT_EQ(broker.Ask("put b new 2"), "ok");
  EXPECT_EQ(broker.Ask("put c gone 2"), "ok");
  EXPECT_EQ(broker.Ask("drop c"), "ok");
  for (int death = 0; death < 5; ++death) {
    KillService(broker);
    RestartKeeper();
    broker = harness_.NextBroker();
    EXPECT_EQ(broker.greeting(), "ready a=value:3 b=new:2");
  }
  EXPECT_EQ(systemd_.Names().size(), 5u + 1u + 2u);  // descriptors, the index, listener and lock
}

TEST_F(KeeperUnderServiceManagerTest, LosesNothingWhenItIsRestartedAndLetsConnectsQueueMeanwhile) {
  RestartKeeper();
  FakeBrokerHandle broker = harness_.NextBroker();
  EXPECT_EQ(broker.Ask("put a value 1"), "ok");
  keeper_->Kill(SIGTERM).IgnoreError();
  EXPECT_EQ(keeper_->Wait(testing::kPatience)->code, 0);
  const UniqueFd client = ConnectTo(harness_.socket(), SOCK_STREAM);
  ASSERT_TRUE(client.valid());
  RestartKeeper();
  broker = harness_.NextBroker();
  EXPECT_EQ(broker.greeting(), "ready a=value:1");
  EXPECT_EQ(broker.Ask("accept"), "ok");
  char name[32] = {};
  EXPECT_GT(recv(client.get(), name, sizeof(name), 0), 0);
}

TEST_F(KeeperUnderServiceManagerTest, MakesAnotherSocketWhenTheFileOfTheOldOneHasGone) {
  RestartKeeper();
  FakeBrokerHandle broker = harness_.NextBroker();
  EXPECT_EQ(broker.Ask("put a value 1"), "ok");
  KillService(broker);
  std::filesystem::remove(harness_.socket());
  RestartKeeper();
  EXPECT_EQ(harness_.NextBroker().greeting(), "ready a=value:1");
  EXPECT_TRUE(ConnectTo(harness_.socket(), SOCK_STREAM).valid());
}

TEST_F(KeeperUnderServiceManagerTest, IsReadyAtOnceWhenItsBrokerIsAnotherUnit) {
  harness_.StartKeeper({"--no_broker", "--keeper_socket=" + harness_.keeper_socket()});
  EXPECT_TRUE(Eventually([&] { return systemd_.WasTold("READY=1"); }));
}

TEST_F(KeeperUnderServiceManagerTest, LetsConnectsQueueEvenWhileNoKeeperRuns) {
  RestartKeeper();
  FakeBrokerHandle broker = harness_.NextBroker();
  KillService(broker);
  const UniqueFd client = ConnectTo(harness_.socket(), SOCK_STREAM);
  ASSERT_TRUE(client.valid());
  RestartKeeper();
  broker = harness_.NextBroker();
  EXPECT_EQ(broker.Ask("accept"), "ok");
  char name[32] = {};
  EXPECT_GT(recv(client.get(), name, sizeof(name), 0), 0);
}

TEST_F(KeeperUnderServiceManagerTest, GoesOnStoringAfterAnUpgrade) {
  RestartKeeper();
  FakeBrokerHandle broker = harness_.NextBroker();
  EXPECT_EQ(broker.Ask("put a value 1"), "ok");
  keeper_->Kill(SIGUSR2).IgnoreError();
  EXPECT_TRUE(harness_.WaitForLog("event=keeper.resumed"));
  EXPECT_EQ(broker.Ask("put b value 1"), "ok");
  EXPECT_EQ(broker.Ask("drop a"), "ok");
  KillService(broker);
  RestartKeeper();
  EXPECT_EQ(harness_.NextBroker().greeting(), "ready b=value:1");
}

TEST_F(KeeperUnderServiceManagerTest, FeedsTheWatchdogAndSaysThatItStops) {
  setenv("WATCHDOG_USEC", "200000", 1);
  RestartKeeper();
  harness_.NextBroker();
  EXPECT_TRUE(Eventually([&] { return systemd_.WasTold("WATCHDOG=1"); }));
  keeper_->Kill(SIGTERM).IgnoreError();
  EXPECT_EQ(keeper_->Wait(testing::kPatience)->code, 0);
  EXPECT_TRUE(systemd_.WasTold("STOPPING=1"));
}

}  // namespace
}  // namespace weightbroker
