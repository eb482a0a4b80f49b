#include "server/endpoint/ticket_box.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <thread>

#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;

constexpr uid_t kUid = 1000;

std::string_view Bytes(const Ticket& ticket) { return {ticket.data(), ticket.size()}; }

class TicketBoxTest : public ::testing::Test {
 protected:
  Ticket Issue(int64_t lease_id = 1, milliseconds lifetime = milliseconds(100)) {
    return box_.Issue({.uid = kUid, .lease_id = lease_id, .fds = fds_}, lifetime);
  }

  std::chrono::steady_clock::time_point now_;
  TicketBox box_{[this] { return now_; }};
  SharedFds fds_ = std::make_shared<std::vector<UniqueFd>>();
};

TEST_F(TicketBoxTest, GivesWhatTheTicketStandsFor) {
  const Ticket ticket = Issue(7);

  const auto grant = box_.Redeem(Bytes(ticket), kUid);

  ASSERT_THAT(grant, IsOk());
  EXPECT_EQ(grant->lease_id, 7);
  EXPECT_EQ(grant->fds, fds_);
}

TEST_F(TicketBoxTest, RefusesATicketUsedTwice) {
  const Ticket ticket = Issue();
  ASSERT_THAT(box_.Redeem(Bytes(ticket), kUid), IsOk());

  EXPECT_THAT(box_.Redeem(Bytes(ticket), kUid), StatusIs(Reason::kTicketInvalid, HasSubstr("used already")));
}

TEST_F(TicketBoxTest, RefusesAnotherUserAndLeavesTheTicketToItsOwner) {
  const Ticket ticket = Issue();

  EXPECT_THAT(box_.Redeem(Bytes(ticket), kUid + 1), StatusIs(Reason::kTicketInvalid, HasSubstr("another user")));
  EXPECT_THAT(box_.Redeem(Bytes(ticket), kUid), IsOk());
}

TEST_F(TicketBoxTest, RefusesATicketOnceItsTimeHasPassed) {
  const Ticket in_time = Issue();
  const Ticket late = Issue();

  now_ += milliseconds(99);
  EXPECT_THAT(box_.Redeem(Bytes(in_time), kUid), IsOk());
  now_ += milliseconds(1);
  EXPECT_THAT(box_.Redeem(Bytes(late), kUid), StatusIs(Reason::kTicketInvalid, HasSubstr("expired")));
}

TEST_F(TicketBoxTest, RefusesTheTicketOfALeaseThatEnded) {
  const Ticket ended = Issue(1);
  const Ticket other = Issue(2);

  box_.Revoke(1);

  EXPECT_THAT(box_.Redeem(Bytes(ended), kUid), StatusIs(Reason::kTicketInvalid));
  EXPECT_THAT(box_.Redeem(Bytes(other), kUid), IsOk());
}

TEST_F(TicketBoxTest, RefusesBytesThatAreNoTicket) {
  Issue();
  EXPECT_THAT(box_.Redeem("", kUid), StatusIs(Reason::kTicketInvalid));
  EXPECT_THAT(box_.Redeem(std::string(kTicketBytes, 'x'), kUid), StatusIs(Reason::kTicketInvalid));
}

TEST_F(TicketBoxTest, CountsAndKeepsOnlyWhatCanStillBeRedeemed) {
  Issue(1);
  Issue(2, milliseconds(1000));
  EXPECT_EQ(box_.size(), 2u);

  now_ += milliseconds(500);
  EXPECT_EQ(box_.size(), 1u);

  const std::weak_ptr<const std::vector<UniqueFd>> held = fds_;
  fds_ = nullptr;
  box_.Revoke(2);
  EXPECT_FALSE(held.expired());  // the expired ticket's
  box_.Issue({.uid = kUid, .lease_id = 3, .fds = nullptr}, milliseconds(1));
  EXPECT_TRUE(held.expired());
}

TEST_F(TicketBoxTest, NeverIssuesATicketTwice) {
  std::set<std::string> seen;
  for (int i = 0; i < 1000; ++i) EXPECT_TRUE(seen.insert(std::string(Bytes(Issue()))).second);
}

TEST_F(TicketBoxTest, GivesATicketToOneOfManyThreads) {
  for (int round = 0; round < 50; ++round) {
    const Ticket ticket = Issue();
    std::atomic<int> redeemed = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] { redeemed += box_.Redeem(Bytes(ticket), kUid).ok() ? 1 : 0; });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(redeemed, 1);
  }
}

}  // namespace
}  // namespace weightbroker
