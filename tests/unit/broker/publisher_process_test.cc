#include "server/broker/publisher_process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>

#include "common/process/spawn.h"

namespace weightbroker {
namespace {

ChildProcess Sleeper() { return *Spawn({.path = "/bin/sleep", .arguments = {"600"}}); }

TEST(PublisherProcess, RunsUntilItHasExitedThoughNobodyHasWaitedForIt) {
  ChildProcess child = Sleeper();
  const PublisherProcess publisher = PublisherProcess::Find(child.pid());
  EXPECT_TRUE(publisher.may_run());
  EXPECT_EQ(publisher.pid(), child.pid());
  EXPECT_GT(publisher.start_ticks(), 0);
  ASSERT_TRUE(child.Kill(SIGKILL).ok());
  while (publisher.may_run()) std::this_thread::yield();
  EXPECT_FALSE(PublisherProcess::Remember(child.pid(), publisher.start_ticks()).may_run());
}

TEST(PublisherProcess, IsFoundAgainByItsIdAndWhenItWasStarted) {
  ChildProcess child = Sleeper();
  const PublisherProcess publisher = PublisherProcess::Find(child.pid());
  EXPECT_TRUE(PublisherProcess::Remember(child.pid(), publisher.start_ticks()).may_run());
}

TEST(PublisherProcess, IsNotTakenForALaterOneWithItsId) {
  ChildProcess child = Sleeper();
  const PublisherProcess publisher = PublisherProcess::Find(child.pid());
  EXPECT_FALSE(PublisherProcess::Remember(child.pid(), publisher.start_ticks() - 1).may_run());
}

TEST(PublisherProcess, HasExitedIfNobodyHasItsId) {
  ChildProcess child = Sleeper();
  const pid_t pid = child.pid();
  ASSERT_TRUE(child.Kill(SIGKILL).ok());
  ASSERT_TRUE(child.Wait().ok());
  EXPECT_FALSE(PublisherProcess::Find(pid).may_run());
}

TEST(PublisherProcess, ThatIsNotSeenIsNeverSeenToExit) {
  EXPECT_TRUE(PublisherProcess::Find(0).may_run());
  EXPECT_TRUE(PublisherProcess::Remember(0, 0).may_run());
}

}  // namespace
}  // namespace weightbroker
