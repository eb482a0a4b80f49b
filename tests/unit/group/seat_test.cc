#include "common/group/seat.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "common/base/clock.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/group/sitter.h"

namespace weightbroker::group {
namespace {

using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;

constexpr int64_t kTimeout = 200 * kMillisecond;
constexpr int64_t kPatience = 20 * kMillisecond;

class GroupSeatTest : public ::testing::Test {
 protected:
  // Turns of everybody in it, as often as heartbeats are due, for some time.
  void Live(const std::vector<Sitter*>& sitters, int64_t duration) {
    for (int64_t passed = 0; passed < duration; passed += 10 * kMillisecond) {
      time_.Pass(10 * kMillisecond);
      for (Sitter* sitter : sitters) ASSERT_THAT(sitter->Turn().status, IsOk());
    }
  }

  const UniqueFd fd_ = NewPage(/*first_epoch=*/100);
  const GroupPage page_ = MapPage(fd_);
  FakeTime time_;
};

TEST_F(GroupSeatTest, MakesTheFirstMemberActiveInTheEpochAfterTheFirst) {
  Sitter first(&page_, &time_);
  const auto turn = first.Turn();
  EXPECT_EQ(turn.role, MemberRole::kActive);
  EXPECT_EQ(turn.epoch, 101U);
  const auto view = page_.Read(time_.now());
  EXPECT_EQ(view->died + view->hung + view->left, 0U) << "nobody was taken over from";
}

TEST_F(GroupSeatTest, LeavesTheActiveMemberAloneAsLongAsItGivesHeartbeats) {
  Sitter first(&page_, &time_);
  Sitter second(&page_, &time_);
  first.Turn();
  Live({&first, &second}, 10 * kTimeout);
  EXPECT_EQ(first.Turn().role, MemberRole::kActive);
  EXPECT_EQ(second.Turn().role, MemberRole::kStandby);
  EXPECT_EQ(page_.ReadTerm()->epoch(), 101U);
}

TEST_F(GroupSeatTest, HasTheFirstStandbyTakeOverAtOnceFromAMemberThatDied) {
  Sitter first(&page_, &time_);
  Sitter second(&page_, &time_);
  Sitter third(&page_, &time_);
  first.Turn();
  Live({&first, &second, &third}, kTimeout);

  first.Die();

  EXPECT_EQ(third.Turn().role, MemberRole::kStandby) << "the second one is before it";
  const auto turn = second.Turn();
  EXPECT_EQ(turn.role, MemberRole::kActive);
  EXPECT_EQ(turn.epoch, 102U);
  EXPECT_EQ(third.Turn().role, MemberRole::kStandby);
  EXPECT_EQ(page_.Read(time_.now())->died, 1U);
}

TEST_F(GroupSeatTest, HasTheNextStandbyTakeOverWhereTheFirstDoesNotMove) {
  Sitter first(&page_, &time_);
  Sitter stuck(&page_, &time_);
  Sitter third(&page_, &time_);
  first.Turn();
  Live({&first, &stuck, &third}, kTimeout);
  first.Die();

  const auto waiting = third.Turn();
  EXPECT_EQ(waiting.role, MemberRole::kStandby);
  EXPECT_EQ(waiting.due_in, kPatience);
  time_.Pass(kPatience);
  EXPECT_EQ(third.Turn().role, MemberRole::kActive);
  EXPECT_EQ(stuck.Turn().role, MemberRole::kStandby);
}

TEST_F(GroupSeatTest, DoesNotWaitForAStandbyThatDiedTogetherWithTheActiveMember) {
  Sitter first(&page_, &time_);
  Sitter second(&page_, &time_);
  Sitter third(&page_, &time_);
  first.Turn();
  Live({&first, &second, &third}, kTimeout);
  second.Die();
  first.Die();
  EXPECT_EQ(third.Turn().role, MemberRole::kActive);
}

TEST_F(GroupSeatTest, FencesAMemberThatHasHungAndTakesItBackOnlyAsAStandby) {
  Sitter first(&page_, &time_);
  Sitter second(&page_, &time_);
  first.Turn();
  Live({&first, &second}, kTimeout);
  const auto waiting = second.Turn();
  EXPECT_LE(waiting.due_in, kTimeout / 4);

  Live({&second}, kTimeout + 10 * kMillisecond);

  EXPECT_EQ(second.Turn().role, MemberRole::kActive);
  EXPECT_EQ(page_.Read(time_.now())->hung, 1U);
  EXPECT_EQ(first.Turn().role, MemberRole::kSuperseded);
  Live({&first, &second}, kTimeout);
  EXPECT_EQ(first.Turn().role, MemberRole::kSuperseded) << "until it says so itself";
  first.Rejoin();
  EXPECT_EQ(first.Turn().role, MemberRole::kStandby);
  second.Die();
  const auto again = first.Turn();
  EXPECT_EQ(again.role, MemberRole::kActive);
  EXPECT_EQ(again.epoch, 103U);
}

TEST_F(GroupSeatTest, NeverMakesASupersededMemberActiveByItself) {
  Sitter first(&page_, &time_);
  Sitter second(&page_, &time_);
  first.Turn();
  Live({&first, &second}, kTimeout);
  Live({&second}, 2 * kTimeout);
  ASSERT_EQ(first.Turn().role, MemberRole::kSuperseded);
  second.Die();
  Live({&first}, 2 * kTimeout);
  EXPECT_EQ(first.Turn().role, MemberRole::kSuperseded);
}

TEST_F(GroupSeatTest, DoesNotTakeAnActiveMemberForHungWhenItStoodStillItself) {
  Sitter first(&page_, &time_);
  Sitter second(&page_, &time_);
  first.Turn();
  Live({&first, &second}, kTimeout);

  time_.Pass(100 * kTimeout);  // the machine was suspended, and the standby is the first to run
  EXPECT_EQ(second.Turn().role, MemberRole::kStandby);
  EXPECT_EQ(first.Turn().role, MemberRole::kActive);
  Live({&first, &second}, kTimeout);
  EXPECT_EQ(page_.ReadTerm()->epoch(), 101U);
}

TEST_F(GroupSeatTest, HasAnotherTakeOverAtOnceFromAMemberThatLeaves) {
  Sitter first(&page_, &time_);
  Sitter second(&page_, &time_);
  first.Turn();
  second.Turn();
  first.Leave();
  EXPECT_EQ(second.Turn().role, MemberRole::kActive);
  EXPECT_EQ(page_.Read(time_.now())->left, 1U);
}

TEST_F(GroupSeatTest, PutsAMemberThatStepsDownBehindAllOthers) {
  Sitter first(&page_, &time_);
  Sitter second(&page_, &time_);
  first.Turn();
  second.Turn();
  first.StepDown();
  EXPECT_EQ(first.Turn().role, MemberRole::kStandby);
  EXPECT_EQ(second.Turn().role, MemberRole::kActive);
  second.Die();
  EXPECT_EQ(first.Turn().epoch, 103U);
}

TEST_F(GroupSeatTest, MakesAMemberThatStepsDownActiveAgainInANewEpochWhereItIsAlone) {
  Sitter first(&page_, &time_);
  first.Turn();
  first.StepDown();
  const auto turn = first.Turn();
  EXPECT_EQ(turn.role, MemberRole::kActive);
  EXPECT_EQ(turn.epoch, 102U);
}

TEST_F(GroupSeatTest, StartsAnewWhenAllHaveDiedWithAGreaterEpoch) {
  std::vector<std::unique_ptr<Sitter>> all;
  for (int i = 0; i < 3; ++i) all.push_back(std::make_unique<Sitter>(&page_, &time_));
  all[0]->Turn();
  for (const auto& sitter : all) sitter->Die();

  Sitter next(&page_, &time_);
  EXPECT_EQ(next.Turn().epoch, 102U);
  const auto view = page_.Read(time_.now());
  EXPECT_EQ(view->members.size(), 1U);
  EXPECT_EQ(view->died, 1U);
}

TEST_F(GroupSeatTest, TakesTheSeatsOfTheDeadButNotOfOneWhoWasActive) {
  Sitter first(&page_, &time_);
  first.Turn();
  const uint32_t was_active = first.index();
  first.Die();
  Sitter second(&page_, &time_);
  const uint32_t taken = second.index();
  EXPECT_NE(taken, was_active);
  second.Die();
  Sitter third(&page_, &time_);
  EXPECT_EQ(third.index(), taken);
  third.Turn();
  Sitter fourth(&page_, &time_);
  EXPECT_EQ(fourth.index(), was_active) << "once another is active";
}

TEST_F(GroupSeatTest, RefusesOneMoreMemberThanThereAreSeats) {
  std::vector<std::unique_ptr<Sitter>> all;
  for (uint32_t i = 0; i < kSeatCount; ++i) {
    all.push_back(std::make_unique<Sitter>(&page_, &time_));
    ASSERT_THAT(all.back()->taken(), IsOk());
  }
  EXPECT_THAT(Sitter(&page_, &time_).taken(), StatusIs(Reason::kGroupFull));
  all[40]->Die();
  EXPECT_THAT(Sitter(&page_, &time_).taken(), IsOk());
}

TEST_F(GroupSeatTest, DoesNotMakeAMemberActiveWhoseEngineGivesNoHeartbeat) {
  Sitter first(&page_, &time_);
  Sitter dumb(&page_, &time_);
  Sitter third(&page_, &time_);
  first.Turn();
  const int64_t last_beat = time_.now();
  for (int i = 0; i < 30; ++i) {
    time_.Pass(10 * kMillisecond);
    first.Turn();
    dumb.Turn(last_beat);
    third.Turn();
  }
  first.Die();
  EXPECT_EQ(dumb.Turn(last_beat).role, MemberRole::kStandby);
  EXPECT_EQ(third.Turn().role, MemberRole::kActive) << "at once: nobody is before it";
}

TEST_F(GroupSeatTest, LeavesAPageWhoseEpochWentBack) {
  Sitter first(&page_, &time_);
  first.Turn();
  first.StepDown();
  first.Turn();
  page_.layout().term = Term::Of(101, std::nullopt).word;
  EXPECT_THAT(first.Turn().status, StatusIs(Reason::kGroupPageInvalid, HasSubstr("went back")));
}

TEST_F(GroupSeatTest, LeavesAPageInWhichItsSeatIsAnothers) {
  Sitter first(&page_, &time_);
  first.Turn();
  const uint32_t word = page_.seat(first.index()).owner.word.exchange(1);
  EXPECT_THAT(first.Turn().status, StatusIs(Reason::kGroupPageInvalid));
  page_.seat(first.index()).owner.word = word;
  page_.seat(first.index()).join_sequence = 77;
  EXPECT_THAT(first.Turn().status, StatusIs(Reason::kGroupPageInvalid));
}

TEST_F(GroupSeatTest, DoesNotBelieveInAHeartbeatThatIsYetToCome) {
  Sitter first(&page_, &time_);
  Sitter second(&page_, &time_);
  first.Turn();
  page_.seat(first.index()).heartbeat_ns = time_.now() + 2'000'000'000;
  EXPECT_THAT(second.Turn().status, StatusIs(Reason::kGroupPageInvalid, HasSubstr("ahead of the clock")));
}

TEST_F(GroupSeatTest, WaitsNoLongerThanUntilTheActiveMemberDies) {
  Sitter second(&page_, &time_);
  auto first = std::make_unique<Sitter>(&page_, &time_);
  second.StepDown();
  first->Turn();
  ASSERT_EQ(first->Turn().role, MemberRole::kStandby);
  time_.Pass(kPatience);
  ASSERT_EQ(first->Turn().role, MemberRole::kActive) << "second has not moved";
  second.Turn();

  std::thread waiting([&] { second.Wait(SteadyNanoseconds() + int64_t{600} * 1'000'000'000); });
  first->Die();
  waiting.join();  // or the test takes ten minutes
  EXPECT_EQ(second.Turn().role, MemberRole::kActive);
}

TEST_F(GroupSeatTest, WaitsNoLongerThanUntilItIsWoken) {
  Sitter only(&page_, &time_);
  only.Turn();
  std::thread waiting([&] { only.Wait(SteadyNanoseconds() + int64_t{600} * 1'000'000'000); });
  only.Wake();
  waiting.join();
}

}  // namespace
}  // namespace weightbroker::group
