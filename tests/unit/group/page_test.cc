#include "common/group/page.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "tests/support/status_matchers.h"
#include "tests/unit/group/sitter.h"

namespace weightbroker::group {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::IsOk;
using ::testing::SizeIs;
using testing::StatusIs;

TEST(GroupPage, SaysWhatItWasMadeFor) {
  const auto fd = CreateGroupPage({.fingerprint = std::string(62, 'a') + "0f",
                                   .heartbeat_timeout = std::chrono::milliseconds(50),
                                   .first_epoch = 7});
  ASSERT_THAT(fd, IsOk());
  const auto page = GroupPage::Map(fd->get());
  ASSERT_THAT(page, IsOk());

  EXPECT_EQ(page->facts().fingerprint, std::string(62, 'a') + "0f");
  EXPECT_EQ(page->facts().heartbeat_timeout, std::chrono::milliseconds(50));
  const auto view = page->Read(0);
  ASSERT_THAT(view, IsOk());
  EXPECT_EQ(view->epoch, 7U);
  EXPECT_THAT(view->members, IsEmpty());
}

TEST(GroupPage, CannotBeTruncatedUnderItsReaders) {
  const UniqueFd fd = NewPage();
  EXPECT_NE(ftruncate(fd.get(), 0), 0);
  EXPECT_NE(ftruncate(fd.get(), 1 << 20), 0);
}

TEST(GroupPage, IsNotMadeForATimeoutOutOfRangeOrForNoFingerprint) {
  EXPECT_THAT(CreateGroupPage({.fingerprint = "abc"}), StatusIs(Reason::kInvalidArgument));
  EXPECT_THAT(CreateGroupPage({.fingerprint = std::string(64, 'A')}), StatusIs(Reason::kInvalidArgument));
  EXPECT_THAT(
      CreateGroupPage({.fingerprint = std::string(64, 'a'), .heartbeat_timeout = std::chrono::milliseconds(19)}),
      StatusIs(Reason::kInvalidArgument));
  EXPECT_THAT(
      CreateGroupPage({.fingerprint = std::string(64, 'a'), .heartbeat_timeout = std::chrono::milliseconds(60'001)}),
      StatusIs(Reason::kInvalidArgument));
}

TEST(GroupPage, RefusesAFileThatCouldBeTruncatedOrIsOfAnotherLength) {
  const UniqueFd unsealed(memfd_create("page", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(unsealed.get(), kPageBytes), 0);
  EXPECT_THAT(GroupPage::Map(unsealed.get()), StatusIs(Reason::kGroupPageInvalid, HasSubstr("sealed")));
  ASSERT_EQ(ftruncate(unsealed.get(), 4096), 0);
  EXPECT_THAT(GroupPage::Map(unsealed.get()), StatusIs(Reason::kGroupPageInvalid, HasSubstr("4096 bytes")));
}

TEST(GroupPage, RefusesAnotherMarkVersionOrSize) {
  const UniqueFd fd = NewPage();
  const GroupPage page = MapPage(fd);
  page.layout().version = 2;
  EXPECT_THAT(GroupPage::Map(fd.get()), StatusIs(Reason::kGroupPageInvalid, HasSubstr("version 2")));
  page.layout().version = kVersion;
  page.layout().seat_count = 65;
  EXPECT_THAT(GroupPage::Map(fd.get()), StatusIs(Reason::kGroupPageInvalid));
  page.layout().seat_count = kSeatCount;
  page.layout().heartbeat_timeout_ns = -1;
  EXPECT_THAT(GroupPage::Map(fd.get()), StatusIs(Reason::kGroupPageInvalid));
  page.layout().heartbeat_timeout_ns = 200 * kMillisecond;
  page.layout().magic = 0;
  EXPECT_THAT(GroupPage::Map(fd.get()), StatusIs(Reason::kGroupPageInvalid));
}

TEST(GroupPage, DoesNotBelieveInASeatThatThereIsNotOrInAnEpochBelowTheFirst) {
  const UniqueFd fd = NewPage(/*first_epoch=*/100);
  const GroupPage page = MapPage(fd);
  page.layout().term = Term::Of(101, 64).word;
  EXPECT_THAT(page.Read(0), StatusIs(Reason::kGroupPageInvalid, HasSubstr("seat 64")));
  page.layout().term = Term::Of(99, 1).word;
  EXPECT_THAT(page.Read(0), StatusIs(Reason::kGroupPageInvalid, HasSubstr("99")));
}

TEST(GroupPage, ListsTheActiveMemberFirstAndTellsWhoHasHung) {
  const UniqueFd fd = NewPage();
  const GroupPage page = MapPage(fd);
  FakeTime time;
  Sitter first(&page, &time);
  Sitter second(&page, &time);
  second.StepDown();
  first.Turn();
  time.Pass(201 * kMillisecond);
  second.Turn();

  const auto view = page.Read(time.now());
  ASSERT_THAT(view, IsOk());
  ASSERT_THAT(view->members, SizeIs(2));
  EXPECT_EQ(view->members[0].role, MemberRole::kActive);
  EXPECT_EQ(view->members[0].process_id, static_cast<uint32_t>(getpid()));
  EXPECT_TRUE(view->members[0].hung);
  EXPECT_EQ(view->members[1].role, MemberRole::kStandby);
  EXPECT_FALSE(view->members[1].hung);
}

TEST(Term, KeepsEpochAndSeatApart) {
  EXPECT_EQ(Term::Of(5, 0).epoch(), 5U);
  EXPECT_EQ(Term::Of(5, 0).seat(), 0U);
  EXPECT_EQ(Term::Of(5, std::nullopt).seat(), std::nullopt);
  EXPECT_EQ(Term::Of(Term::kGreatestEpoch, 63).epoch(), Term::kGreatestEpoch);
  EXPECT_EQ(Term::Of(Term::kGreatestEpoch, 63).seat(), 63U);
}

}  // namespace
}  // namespace weightbroker::group
