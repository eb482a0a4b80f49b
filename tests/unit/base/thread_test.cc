#include "common/base/thread.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>

#include "tests/support/no_more_threads.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::ExitedWithCode;
using ::testing::HasSubstr;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::NoMoreThreads;
using ::weightbroker::testing::StatusIs;

TEST(StartThread, RunsItsBody) {
  bool ran = false;
  auto thread = StartThread("a test", [&] { ran = true; });
  ASSERT_THAT(thread, IsOk());
  thread->join();
  EXPECT_TRUE(ran);
}

TEST(StartThread, SaysWhatForAndWhyThereIsNoneToBeHad) {
  const NoMoreThreads no_more_threads;
  const auto thread = StartThread("a test", [] {});
  EXPECT_THAT(thread, StatusIs(Reason::kSystemError, HasSubstr("cannot start a thread for a test")));
  EXPECT_THAT(thread, HasMetadata("errno", "EAGAIN"));
}

TEST(StartThreadDeathTest, EndsAProgramThatCannotWorkWithoutIt) {
  EXPECT_EXIT(
      {
        const NoMoreThreads no_more_threads;
        StartThreadOrExit("a test", [] {});
      },
      ExitedWithCode(1), "event=thread.not_started");
}

TEST(ExitUnlessEndedWithinDeathTest, EndsAProgramThatDoesNotEnd) {
  EXPECT_EXIT(
      {
        ExitUnlessEndedWithin(std::chrono::milliseconds(20), "broker.stuck");
        pause();
      },
      ExitedWithCode(1), "event=broker.stuck after_ms=20");
}

TEST(ExitUnlessEndedWithinDeathTest, LeavesOneAloneThatDoes) {
  EXPECT_EXIT(
      {
        ExitUnlessEndedWithin(std::chrono::hours(1), "broker.stuck");
        std::exit(7);
      },
      ExitedWithCode(7), "");
}

}  // namespace
}  // namespace weightbroker
