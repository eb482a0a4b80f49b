#include "common/group/member.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <memory>
#include <utility>

#include "tests/support/status_matchers.h"
#include "tests/unit/group/sitter.h"

namespace weightbroker::group {
namespace {

using testing::IsOk;
using testing::StatusIs;

MATCHER_P(IsOkAndHolds, value, "") { return arg.ok() && *arg == static_cast<uint64_t>(value); }

GroupMember::TimePoint Soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(60); }
GroupMember::TimePoint Now() { return std::chrono::steady_clock::now(); }

class GroupMemberTest : public ::testing::Test {
 protected:
  std::unique_ptr<GroupMember> Join(MemberOptions options = {}) {
    auto member = GroupMember::Join(MapPage(fd_), options);
    EXPECT_THAT(member, IsOk());
    return *std::move(member);
  }

  // A thread that does not get to run for so long would be taken for hung, and a test fail.
  const UniqueFd fd_ = NewPage(/*first_epoch=*/100, std::chrono::seconds(2));
  const GroupPage page_ = MapPage(fd_);
};

TEST_F(GroupMemberTest, BecomesActiveAloneAndIsSoInThatEpochOnly) {
  const auto member = Join();
  ASSERT_THAT(member->WaitUntilActive(Soon()), IsOkAndHolds(101));
  EXPECT_TRUE(member->IsActive(101));
  EXPECT_FALSE(member->IsActive(100));
  EXPECT_FALSE(member->IsActive(102));
}

TEST_F(GroupMemberTest, StandsByWhileAnotherIsActiveAndFollowsWhenThatOneLeaves) {
  auto first = Join();
  ASSERT_THAT(first->WaitUntilActive(Soon()), IsOk());
  const auto second = Join();
  EXPECT_THAT(second->WaitUntilActive(Now()), StatusIs(Reason::kDeadlineExceeded));
  EXPECT_EQ(second->standing().role, MemberRole::kStandby);

  first->Leave();
  EXPECT_FALSE(first->IsActive(101));
  EXPECT_THAT(first->WaitUntilActive(Soon()), StatusIs(Reason::kCancelled));
  EXPECT_THAT(second->WaitUntilActive(Soon()), IsOkAndHolds(102));
}

TEST_F(GroupMemberTest, IsNotActiveFromTheMomentThatAnotherIs) {
  const auto member = Join();
  ASSERT_THAT(member->WaitUntilActive(Soon()), IsOk());
  page_.layout().term = Term::Of(102, 63).word;  // as another does who takes over
  EXPECT_FALSE(member->IsActive(101)) << "whatever its thread has seen by now";
}

TEST_F(GroupMemberTest, IsToldThatItHasBeenSupersededAndRejoins) {
  const auto member = Join();
  ASSERT_THAT(member->WaitUntilActive(Soon()), IsOk());
  page_.layout().term = Term::Of(102, std::nullopt).word;
  absl::StatusOr<uint64_t> epoch = member->WaitUntilActive(Soon());
  while (epoch.ok()) epoch = member->WaitUntilActive(Soon());  // its thread has not looked yet
  EXPECT_THAT(epoch, StatusIs(Reason::kGroupSuperseded));
  EXPECT_THAT(member->Rejoin(), IsOk());
  EXPECT_THAT(member->WaitUntilActive(Soon()), IsOkAndHolds(103));
}

TEST_F(GroupMemberTest, StepsDownForAnother) {
  const auto first = Join();
  ASSERT_THAT(first->WaitUntilActive(Soon()), IsOk());
  const auto second = Join();
  first->StepDown();
  EXPECT_FALSE(first->IsActive(101));
  ASSERT_THAT(second->WaitUntilActive(Soon()), IsOk());
  EXPECT_FALSE(first->IsActive(101));
}

TEST_F(GroupMemberTest, TellsAnEventLoop) {
  const auto member = Join();
  pollfd event = {member->event_fd(), POLLIN, 0};
  ASSERT_EQ(poll(&event, 1, 60'000), 1);
  ASSERT_THAT(member->WaitUntilActive(Soon()), IsOk());
  uint64_t count = 0;
  ASSERT_EQ(read(member->event_fd(), &count, sizeof(count)), static_cast<ssize_t>(sizeof(count)));
  member->Leave();
  EXPECT_EQ(poll(&event, 1, 0), 1);
}

TEST_F(GroupMemberTest, IsFencedWhoseEngineGivesNoHeartbeat) {
  const auto dumb = Join({.beats_itself = true});
  ASSERT_THAT(dumb->WaitUntilActive(Soon()), IsOk());
  const auto second = Join();
  ASSERT_THAT(second->WaitUntilActive(Soon()), IsOk());
  EXPECT_FALSE(dumb->IsActive(101));
  EXPECT_EQ(page_.Read(SteadyNanoseconds())->hung, 1U);
}

TEST_F(GroupMemberTest, LeavesAPageOfRubbishAndSaysSo) {
  const auto member = Join();
  ASSERT_THAT(member->WaitUntilActive(Soon()), IsOk());
  page_.layout().term = ~uint64_t{0};
  absl::StatusOr<uint64_t> epoch = member->WaitUntilActive(Soon());
  while (epoch.ok()) epoch = member->WaitUntilActive(Soon());
  EXPECT_THAT(epoch, StatusIs(Reason::kGroupPageInvalid));
  EXPECT_FALSE(member->IsActive(101));
  EXPECT_THAT(member->Rejoin(), StatusIs(Reason::kGroupPageInvalid));
}

TEST_F(GroupMemberTest, DoesNotJoinAPageOfRubbish) {
  page_.layout().term = ~uint64_t{0};
  EXPECT_THAT(GroupMember::Join(MapPage(fd_)), StatusIs(Reason::kGroupPageInvalid));
}

}  // namespace
}  // namespace weightbroker::group
