#include "server/keeper/supervisor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace weightbroker {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Action = SupervisorAction;
using Phase = Supervisor::Phase;

class SupervisorTest : public ::testing::Test {
 protected:
  Action Next() const { return supervisor_.Next(now_); }
  void Pass(milliseconds time) { now_ += time; }
  void StartAndGetReady() {
    supervisor_.OnStarted(now_);
    supervisor_.OnReady(now_);
  }

  Supervisor::TimePoint now_{seconds(1'000)};
  Supervisor supervisor_{SupervisorTiming{}, {}};
};

TEST_F(SupervisorTest, StartsTheFirstBrokerAtOnce) { EXPECT_EQ(Next(), Action::kStart); }

TEST_F(SupervisorTest, ReplacesABrokerThatHadBeenReadyAtOnce) {
  StartAndGetReady();
  supervisor_.OnEnded(now_);
  EXPECT_EQ(Next(), Action::kStart);
}

TEST_F(SupervisorTest, WaitsLongerEachTimeABrokerEndsBeforeItIsReady) {
  int64_t expected_ms = 20;
  for (int attempt = 0; attempt < 12; ++attempt) {
    supervisor_.OnStarted(now_);
    supervisor_.OnEnded(now_);
    EXPECT_EQ(supervisor_.UntilStart(now_).count(), expected_ms);
    Pass(milliseconds(expected_ms - 1));
    EXPECT_EQ(Next(), Action::kNothing);
    Pass(milliseconds(1));
    EXPECT_EQ(Next(), Action::kStart);
    expected_ms = std::min<int64_t>(2 * expected_ms, 5'000);
  }
}

TEST_F(SupervisorTest, WaitsLongerEachTimeABrokerCannotBeStarted) {
  supervisor_.OnEnded(now_);
  EXPECT_EQ(supervisor_.UntilStart(now_), milliseconds(20));
  supervisor_.OnEnded(now_);
  EXPECT_EQ(supervisor_.UntilStart(now_), milliseconds(40));
}

TEST_F(SupervisorTest, ForgetsFailedStartsOnceABrokerIsReady) {
  for (int i = 0; i < 5; ++i) {
    supervisor_.OnStarted(now_);
    supervisor_.OnEnded(now_);
  }
  StartAndGetReady();
  supervisor_.OnEnded(now_);
  EXPECT_EQ(supervisor_.UntilStart(now_), milliseconds(0));
}

TEST_F(SupervisorTest, PingsEverySecondAsLongAsItIsAnswered) {
  StartAndGetReady();
  for (int64_t number = 1; number < 4; ++number) {
    EXPECT_EQ(supervisor_.deadline(), now_ + seconds(1));
    Pass(milliseconds(999));
    EXPECT_EQ(Next(), Action::kNothing);
    Pass(milliseconds(1));
    EXPECT_EQ(Next(), Action::kPing);
    EXPECT_EQ(supervisor_.OnPing(now_), number);
    EXPECT_EQ(Next(), Action::kNothing);
    supervisor_.OnPong(number);
  }
}

TEST_F(SupervisorTest, KillsABrokerThatHasNotAnsweredInTimeAndReplacesItAtOnce) {
  StartAndGetReady();
  Pass(seconds(1));
  supervisor_.OnPing(now_);
  EXPECT_EQ(supervisor_.deadline(), now_ + seconds(5));
  Pass(milliseconds(4'999));
  EXPECT_EQ(Next(), Action::kNothing);
  Pass(milliseconds(1));
  EXPECT_EQ(Next(), Action::kKill);
  EXPECT_EQ(supervisor_.KillCause(now_), "it has not answered a ping for 5000 ms");
  supervisor_.OnKilled(now_);
  EXPECT_EQ(Next(), Action::kNothing);  // until it is reaped
  supervisor_.OnEnded(now_);
  EXPECT_EQ(Next(), Action::kStart);
}

TEST_F(SupervisorTest, TakesNoOldAnswerForANewOne) {
  StartAndGetReady();
  supervisor_.OnPing(now_);
  supervisor_.OnPong(1);
  supervisor_.OnPing(now_);
  supervisor_.OnPong(1);
  Pass(seconds(5));
  EXPECT_EQ(Next(), Action::kKill);
}

TEST_F(SupervisorTest, KillsABrokerThatIsNotReadyInTimeAndWaitsBeforeTheNext) {
  supervisor_.OnStarted(now_);
  EXPECT_EQ(supervisor_.deadline(), now_ + seconds(30));
  Pass(seconds(30));
  EXPECT_EQ(Next(), Action::kKill);
  EXPECT_EQ(supervisor_.KillCause(now_), "it was not ready after 30000 ms");
  supervisor_.OnKilled(now_);
  supervisor_.OnEnded(now_);
  EXPECT_EQ(supervisor_.UntilStart(now_), milliseconds(20));
}

TEST_F(SupervisorTest, NeverKillsForATimeoutOfZero) {
  Supervisor patient({.ping_timeout = milliseconds(0), .start_timeout = milliseconds(0)}, {});
  patient.OnStarted(now_);
  EXPECT_EQ(patient.Next(now_ + seconds(1'000'000)), Action::kNothing);
  EXPECT_EQ(patient.deadline(), std::nullopt);
  patient.OnReady(now_);
  patient.OnPing(now_);
  EXPECT_EQ(patient.Next(now_ + seconds(1'000'000)), Action::kNothing);
}

TEST_F(SupervisorTest, StartsNothingWhenItMayNot) {
  supervisor_.set_may_start(false);
  EXPECT_EQ(Next(), Action::kNothing);
  EXPECT_EQ(supervisor_.deadline(), std::nullopt);
}

TEST_F(SupervisorTest, GoesOnFromItsStateAsIfNothingHadHappened) {
  StartAndGetReady();
  Pass(seconds(1));
  supervisor_.OnPing(now_);
  Pass(seconds(3));
  Supervisor resumed(SupervisorTiming{}, supervisor_.state());
  EXPECT_EQ(resumed.phase(), Phase::kReady);
  EXPECT_EQ(resumed.Next(now_), Action::kNothing);
  EXPECT_EQ(resumed.Next(now_ + seconds(2)), Action::kKill);
  resumed.OnPong(1);
  EXPECT_EQ(resumed.Next(now_), Action::kPing);
}

}  // namespace
}  // namespace weightbroker
