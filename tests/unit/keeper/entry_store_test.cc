#include "server/keeper/entry_store.h"

#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"
#include "tests/unit/keeper/fds.h"

namespace weightbroker {
namespace {

using testing::ContentsOf;
using testing::CountOpenFds;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::MakeMemfd;
using testing::StatusIs;

KeeperMessage Part(int part, int parts, const std::string& key, const std::string& value = "", int64_t request_id = 1) {
  return {.type = KeeperMessageType::kPut,
          .request_id = request_id,
          .part = part,
          .parts = parts,
          .key = key,
          .value = value};
}

std::vector<UniqueFd> Memfds(int count, const std::string& contents = "") {
  std::vector<UniqueFd> fds;
  for (int i = 0; i < count; ++i) fds.push_back(MakeMemfd(contents));
  return fds;
}

TEST(EntryStore, KeepsAnEntryOfOnePart) {
  EntryStore store({});
  const auto put = store.AddPart(Part(0, 1, "a", "value"), Memfds(2, "slab"));
  ASSERT_THAT(put, IsOk());
  ASSERT_EQ(put->state, PutState::kStored);
  EXPECT_EQ(put->replaced, nullptr);
  ASSERT_EQ(store.entries().size(), 1);
  EXPECT_EQ(store.entries()[0]->value, "value");
  EXPECT_EQ(ContentsOf(store.entries()[0]->fds[1].get()), "slab");
  EXPECT_EQ(store.fd_count(), 2);
  EXPECT_EQ(store.value_bytes(), 6);
}

// As a broker does that ends while it takes `key` up.
SharedEntry EndOver(EntryStore* store, const std::string& key) {
  store->TakingUp(key);
  return store->OnBrokerEnded();
}

TEST(EntryStore, DropsAnEntryThatTooManyBrokersInARowHaveDiedOf) {
  EntryStore store({.max_attempts = 3});
  for (const char* key : {"a", "b"}) ASSERT_THAT(store.AddPart(Part(0, 1, key), Memfds(1)), IsOk());
  EXPECT_EQ(EndOver(&store, "a"), nullptr);
  EXPECT_EQ(EndOver(&store, "b"), nullptr);
  EXPECT_EQ(EndOver(&store, "a"), nullptr);
  EXPECT_EQ(store.dropped(), 0);
  const SharedEntry dropped = EndOver(&store, "a");
  ASSERT_NE(dropped, nullptr);
  EXPECT_EQ(dropped->key, "a");
  EXPECT_EQ(store.dropped(), 1);
  ASSERT_EQ(store.entries().size(), 1);
  EXPECT_EQ(store.entries()[0]->key, "b");
}

TEST(EntryStore, BlamesAnEntryOnlyForBrokersThatWereTakingItUp) {
  EntryStore store({.max_attempts = 1});
  ASSERT_THAT(store.AddPart(Part(0, 1, "a"), {}), IsOk());
  EXPECT_EQ(store.OnBrokerEnded(), nullptr);
  EXPECT_EQ(EndOver(&store, ""), nullptr);
  EXPECT_EQ(EndOver(&store, "not there"), nullptr);
  store.TakingUp("a");
  store.OnBrokerReady();
  EXPECT_EQ(store.OnBrokerEnded(), nullptr);
  EXPECT_EQ(store.size(), 1);
}

TEST(EntryStore, ForgetsAttemptsOnceABrokerIsReadyOrTheEntryIsAnother) {
  EntryStore store({.max_attempts = 2});
  ASSERT_THAT(store.AddPart(Part(0, 1, "a"), {}), IsOk());
  EXPECT_EQ(EndOver(&store, "a"), nullptr);
  store.OnBrokerReady();
  EXPECT_EQ(EndOver(&store, "a"), nullptr);
  ASSERT_THAT(store.AddPart(Part(0, 1, "a", "new"), {}), IsOk());
  EXPECT_EQ(EndOver(&store, "a"), nullptr);
  EXPECT_NE(EndOver(&store, "a"), nullptr);
}

TEST(EntryStore, ReplacesAnEntryOnlyWhenTheLastPartIsThere) {
  EntryStore store({});
  ASSERT_THAT(store.AddPart(Part(0, 1, "a", "old"), Memfds(1)), IsOk());
  const auto half = store.AddPart(Part(0, 2, "a", "ne"), Memfds(1));
  ASSERT_THAT(half, IsOk());
  EXPECT_EQ(half->state, PutState::kPartial);
  EXPECT_EQ(store.entries()[0]->value, "old");
  const auto whole = store.AddPart(Part(1, 2, "a", "w"), Memfds(2));
  ASSERT_THAT(whole, IsOk());
  EXPECT_EQ(whole->state, PutState::kStored);
  EXPECT_EQ(whole->replaced->value, "old");
  EXPECT_EQ(store.entries()[0]->value, "new");
  EXPECT_EQ(store.fd_count(), 3);
}

TEST(EntryStore, ForgetsAHalfEntryAndClosesItsDescriptors) {
  EntryStore store({});
  ASSERT_THAT(store.AddPart(Part(0, 1, "a", "old"), {}), IsOk());
  const int before = CountOpenFds();
  ASSERT_THAT(store.AddPart(Part(0, 2, "a", "new"), Memfds(10)), IsOk());
  EXPECT_TRUE(store.has_partial());
  store.DropPartial();
  EXPECT_EQ(CountOpenFds(), before);
  EXPECT_EQ(store.entries()[0]->value, "old");
  const auto next = store.AddPart(Part(0, 1, "b", "", 2), {});
  ASSERT_THAT(next, IsOk());
  EXPECT_EQ(next->state, PutState::kStored);
}

TEST(EntryStore, ClosesTheDescriptorsOfWhatIsDroppedOrReplaced) {
  EntryStore store({});
  const int before = CountOpenFds();
  ASSERT_THAT(store.AddPart(Part(0, 1, "a"), Memfds(3)), IsOk());
  ASSERT_THAT(store.AddPart(Part(0, 1, "a"), Memfds(2)), IsOk());
  EXPECT_EQ(CountOpenFds(), before + 2);
  EXPECT_NE(store.Drop("a"), nullptr);
  EXPECT_EQ(store.Drop("a"), nullptr);
  EXPECT_EQ(CountOpenFds(), before);
  EXPECT_EQ(store.fd_count(), 0);
  EXPECT_EQ(store.value_bytes(), 0);
}

TEST(EntryStore, RefusesPartsThatAreOutOfTurn) {
  EntryStore store({});
  EXPECT_THAT(store.AddPart(Part(1, 2, "a"), {}), StatusIs(Reason::kProtocolError, HasSubstr("part 1 of 2")));
  EXPECT_THAT(store.AddPart(Part(0, 1, ""), {}), StatusIs(Reason::kProtocolError, HasSubstr("key of 0 bytes")));
  ASSERT_THAT(store.AddPart(Part(0, 3, "a"), {}), IsOk());
  EXPECT_THAT(store.AddPart(Part(2, 3, "a"), {}), StatusIs(Reason::kProtocolError));
  EXPECT_THAT(store.AddPart(Part(0, 1, "b"), {}), StatusIs(Reason::kProtocolError));
  EXPECT_THAT(store.AddPart(Part(1, 3, "a", "", 2), {}), StatusIs(Reason::kProtocolError));
  EXPECT_THAT(store.AddPart(Part(1, 3, "b"), {}), StatusIs(Reason::kProtocolError));
  EXPECT_THAT(store.AddPart(Part(1, 3, "a"), {}), IsOk());
}

TEST(EntryStore, RefusesAnEntryOverALimitOnceAllOfItIsThereAndKeepsTheOldOne) {
  EntryStore store({.max_entries = 2, .max_value_bytes = 20, .max_fds = 5});
  ASSERT_THAT(store.AddPart(Part(0, 1, "a", "old"), Memfds(2)), IsOk());
  const int before = CountOpenFds();

  // The first part is over the limit already; the rest of the request is taken and thrown away.
  const auto first = store.AddPart(Part(0, 2, "a", "new"), Memfds(4));
  ASSERT_THAT(first, IsOk());
  EXPECT_EQ(first->state, PutState::kPartial);
  EXPECT_EQ(CountOpenFds(), before);
  const auto fds = store.AddPart(Part(1, 2, "a", "new"), Memfds(4));
  ASSERT_THAT(fds, IsOk());
  EXPECT_EQ(fds->state, PutState::kRefused);
  EXPECT_THAT(fds->refusal, HasSubstr("would hold 6 file descriptors; its limit is 5"));
  EXPECT_EQ(store.entries()[0]->value, "old");

  const auto bytes = store.AddPart(Part(0, 1, "b", std::string(16, 'v')), {});
  ASSERT_THAT(bytes, IsOk());
  EXPECT_THAT(bytes->refusal, HasSubstr("21 bytes of values; its limit is 20"));
  ASSERT_THAT(store.AddPart(Part(0, 1, "b"), {}), IsOk());
  const auto entries = store.AddPart(Part(0, 1, "c"), {});
  ASSERT_THAT(entries, IsOk());
  EXPECT_THAT(entries->refusal, HasSubstr("3 entries; its limit is 2"));
  EXPECT_EQ(store.size(), 2);
}

TEST(EntryStore, LetsAnEntryAtTheLimitBeReplacedByOneAsLong) {
  EntryStore store({.max_entries = 1, .max_value_bytes = 4, .max_fds = 2});
  ASSERT_THAT(store.AddPart(Part(0, 1, "a", "old"), Memfds(1)), IsOk());
  const auto put = store.AddPart(Part(0, 1, "a", "new"), Memfds(1));
  ASSERT_THAT(put, IsOk());
  EXPECT_EQ(put->state, PutState::kStored);
}

TEST(EntryStore, KeepsWhatSomebodyStillSendsAlive) {
  EntryStore store({});
  ASSERT_THAT(store.AddPart(Part(0, 1, "a"), Memfds(1, "slab")), IsOk());
  const SharedEntry in_flight = store.entries()[0];
  store.Drop("a");
  EXPECT_EQ(ContentsOf(in_flight->fds[0].get()), "slab");
}

}  // namespace
}  // namespace weightbroker
