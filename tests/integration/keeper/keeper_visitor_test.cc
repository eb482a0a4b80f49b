// A real keeper and brokers that it has not started, over its private socket.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "tests/integration/keeper/harness.h"

namespace weightbroker {
namespace {

using std::chrono::milliseconds;
using testing::ConnectTo;
using testing::Eventually;
using testing::FakeBrokerHandle;
using ::testing::HasSubstr;
using testing::IsRunning;
using testing::KeeperHarness;

class KeeperVisitorTest : public ::testing::Test {
 protected:
  void StartKeeper(std::vector<std::string> arguments = {}) {
    arguments.push_back("--no_broker");
    arguments.push_back("--keeper_socket=" + harness_.keeper_socket());
    harness_.StartKeeper(arguments);
  }

  KeeperHarness harness_;
};

TEST_F(KeeperVisitorTest, GivesWhatOneBrokerLeftToTheNext) {
  StartKeeper();
  {
    ChildProcess process = harness_.StartVisitor();
    FakeBrokerHandle broker = harness_.NextBroker();
    EXPECT_EQ(broker.greeting(), "ready ");
    EXPECT_EQ(broker.Ask("put a value 2"), "ok");
    EXPECT_EQ(broker.Ask("spawn").find("pid"), std::string::npos);
  }
  EXPECT_TRUE(harness_.WaitForLog("event=broker.ended"));
  ChildProcess process = harness_.StartVisitor();
  EXPECT_EQ(harness_.NextBroker().greeting(), "ready a=value:2");
}

TEST_F(KeeperVisitorTest, LetsOnlyItsOwnUserIn) {
  StartKeeper();
  EXPECT_TRUE(harness_.WaitForLog("event=keeper.started"));
  struct stat file = {};
  ASSERT_EQ(stat(harness_.keeper_socket().c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0600u);
}

TEST_F(KeeperVisitorTest, RefusesASecondBrokerAndKeepsTheFirst) {
  StartKeeper();
  ChildProcess first_process = harness_.StartVisitor();
  FakeBrokerHandle first = harness_.NextBroker();
  ChildProcess second_process = harness_.StartVisitor();
  EXPECT_EQ(harness_.NextBroker().greeting(),
            "refused: the keeper refused: another broker is connected (process " + std::to_string(first.pid()) + ")");
  EXPECT_EQ(first.Ask("put a value 1"), "ok");
}

TEST_F(KeeperVisitorTest, KillsABrokerThatHangsAndWelcomesTheNext) {
  StartKeeper({"--broker_ping_interval=50ms", "--broker_ping_timeout=200ms"});
  ChildProcess process = harness_.StartVisitor();
  FakeBrokerHandle broker = harness_.NextBroker();
  broker.Stop();
  const auto exit = process.Wait(testing::kPatience);
  ASSERT_TRUE(exit.ok());
  EXPECT_EQ(exit->signal, SIGKILL);
  ChildProcess next_process = harness_.StartVisitor();
  EXPECT_EQ(harness_.NextBroker().greeting(), "ready ");
}

TEST_F(KeeperVisitorTest, SendsAwayWhoSaysSomethingElseOrNothing) {
  StartKeeper();
  EXPECT_TRUE(harness_.WaitForLog("event=keeper.started"));
  const UniqueFd silent = ConnectTo(harness_.keeper_socket(), SOCK_SEQPACKET);
  const UniqueFd rude = ConnectTo(harness_.keeper_socket(), SOCK_SEQPACKET);
  ASSERT_TRUE(SendMessage(rude.get(), "garbage").ok());
  const auto answer = ReceiveMessage(rude.get(), testing::kPatience);
  ASSERT_TRUE(answer.ok());
  EXPECT_TRUE(answer->closed);
  // Others need not wait for the silent one.
  ChildProcess process = harness_.StartVisitor();
  EXPECT_EQ(harness_.NextBroker().greeting(), "ready ");
  const auto end = ReceiveMessage(silent.get(), testing::kPatience);
  ASSERT_TRUE(end.ok());
  EXPECT_TRUE(end->closed);
}

TEST_F(KeeperVisitorTest, LeavesABrokerThatItHasNotStartedToItsOwnEnd) {
  StartKeeper();
  ChildProcess process = harness_.StartVisitor();
  FakeBrokerHandle broker = harness_.NextBroker();
  EXPECT_EQ(harness_.StopKeeper(), 0);
  const auto exit = process.Wait(testing::kPatience);
  ASSERT_TRUE(exit.ok());
  EXPECT_EQ(exit->code, 7);  // it saw that its keeper had gone
}

TEST_F(KeeperVisitorTest, KeepsAConnectedBrokerOverAnUpgrade) {
  StartKeeper();
  ChildProcess process = harness_.StartVisitor();
  FakeBrokerHandle broker = harness_.NextBroker();
  EXPECT_EQ(broker.Ask("put a value 1"), "ok");
  kill(harness_.keeper_pid(), SIGUSR2);
  EXPECT_TRUE(harness_.WaitForLog("event=keeper.resumed"));
  EXPECT_EQ(broker.Ask("put b value 1"), "ok");
  broker.Kill();
  EXPECT_TRUE(harness_.WaitForLog("event=broker.ended"));
  ChildProcess next_process = harness_.StartVisitor();
  EXPECT_EQ(harness_.NextBroker().greeting(), "ready a=value:1 b=value:1");
}

TEST_F(KeeperVisitorTest, RefusesVisitorsWhileItsOwnBrokerRuns) {
  harness_.StartKeeper({"--keeper_socket=" + harness_.keeper_socket()});
  FakeBrokerHandle own = harness_.NextBroker();
  ChildProcess process = harness_.StartVisitor();
  EXPECT_THAT(harness_.NextBroker().greeting(), HasSubstr("another broker is connected"));
  EXPECT_EQ(own.Ask("put a value 1"), "ok");
}

}  // namespace
}  // namespace weightbroker
