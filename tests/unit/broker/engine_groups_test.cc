#include "server/broker/engine_groups.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/group/member.h"
#include "server/broker/adoption.h"
#include "server/broker/kept_group.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/broker/fake_clock.h"

namespace weightbroker {
namespace {

using ::testing::ElementsAre;
using testing::FakeClock;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::IsOk;
using testing::StatusIs;

const std::string kWeights(64, 'a');
const std::string kOtherWeights(64, 'b');
const Peer kOwner = {.uid = 1000, .gid = 1000, .pid = 1};
const Peer kOther = {.uid = 1001, .gid = 1001, .pid = 2};
const Peer kRoot = {.uid = 0, .gid = 0, .pid = 3};

v1::JoinGroupRequest RequestFor(const std::string& name, const std::string& fingerprint = kWeights) {
  v1::JoinGroupRequest request;
  request.set_name(name);
  request.set_fingerprint(fingerprint);
  return request;
}

v1::RemoveGroupRequest Removal(const std::string& name, bool force = false) {
  v1::RemoveGroupRequest request;
  request.set_name(name);
  request.set_force(force);
  return request;
}

ino_t InodeOf(int fd) {
  struct stat status = {};
  EXPECT_EQ(fstat(fd, &status), 0);
  return status.st_ino;
}

// Remembers groups, and refuses if it is told to.
class GroupVault : public ShardVault {
 public:
  absl::Status Keep(const ShardToKeep&) override { return absl::OkStatus(); }
  absl::Status Forget(const std::string&, int32_t) override { return absl::OkStatus(); }
  absl::Status KeepLoad(const NewWeightSet&, int32_t) override { return absl::OkStatus(); }
  absl::Status ForgetLoad(const std::string&) override { return absl::OkStatus(); }
  absl::Status KeepGeneration(const std::string&, int64_t) override { return absl::OkStatus(); }
  absl::Status ForgetGeneration(const std::string&) override { return absl::OkStatus(); }
  absl::Status KeepAlias(const KeptAlias&) override { return absl::OkStatus(); }
  absl::Status ForgetAlias(const std::string&) override { return absl::OkStatus(); }
  absl::Status KeepGroup(const KeptGroup& group) override {
    if (on_keep) on_keep();
    if (!answer.ok()) return answer;
    kept.push_back(group);
    return absl::OkStatus();
  }
  absl::Status ForgetGroup(const std::string& name) override {
    std::erase_if(kept, [&](const KeptGroup& group) { return group.name == name; });
    return absl::OkStatus();
  }
  Adoption TakeAdoption() override { return {}; }
  bool outlives_broker() const override { return true; }

  std::vector<KeptGroup> kept;
  absl::Status answer;
  std::function<void()> on_keep;
};

class EngineGroupsTest : public ::testing::Test {
 protected:
  std::unique_ptr<EngineGroups> Make() {
    return std::make_unique<EngineGroups>(
        EngineGroupsOptions{.vault = &vault_, .clock = &clock_, .is_resident = [](const std::string& fingerprint) {
                              return fingerprint == kWeights;
                            }});
  }

  static std::unique_ptr<group::GroupMember> Sit(const EngineGroups::Joined& joined) {
    auto page = group::GroupPage::Map(joined.page->front().get());
    EXPECT_THAT(page, IsOk());
    auto member = group::GroupMember::Join(*std::move(page));
    EXPECT_THAT(member, IsOk());
    return *std::move(member);
  }

  GroupVault vault_;
  FakeClock clock_;
  std::unique_ptr<EngineGroups> groups_ = Make();
};

TEST_F(EngineGroupsTest, GivesAllWhoJoinTheSamePage) {
  const auto first = groups_->Join(RequestFor("g"), kOwner);
  const auto second = groups_->Join(RequestFor("g"), kOwner);
  ASSERT_THAT(first, IsOk());
  ASSERT_THAT(second, IsOk());
  EXPECT_EQ(InodeOf(first->page->front().get()), InodeOf(second->page->front().get()));
  EXPECT_EQ(first->group.heartbeat_timeout().nanos(), 200'000'000);
}

TEST_F(EngineGroupsTest, StartsTheEpochsOfANewGroupAtTheWallClock) {
  const auto joined = groups_->Join(RequestFor("g"), kOwner);
  ASSERT_THAT(joined, IsOk());
  EXPECT_EQ(joined->group.epoch(), 1'700'000'000'000);
}

TEST_F(EngineGroupsTest, KeepsAGroupBeforeItGivesItsPageOut) {
  ASSERT_THAT(groups_->Join(RequestFor("g"), kOwner), IsOk());
  ASSERT_EQ(vault_.kept.size(), 1U);
  EXPECT_EQ(vault_.kept[0].name, "g");
  EXPECT_EQ(vault_.kept[0].owner_uid, kOwner.uid);
}

TEST_F(EngineGroupsTest, LetsASecondJoinWaitUntilTheGroupIsKept) {
  std::promise<void> keeping;
  std::promise<void> go_on;
  vault_.on_keep = [&] {
    keeping.set_value();
    go_on.get_future().wait();
  };
  auto first = std::async(std::launch::async, [&] { return groups_->Join(RequestFor("g"), kOwner).status(); });
  keeping.get_future().wait();
  auto second = std::async(std::launch::async, [&] { return groups_->Join(RequestFor("g"), kOwner).status(); });
  EXPECT_EQ(second.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  go_on.set_value();
  EXPECT_THAT(first.get(), IsOk());
  EXPECT_THAT(second.get(), IsOk());
}

TEST_F(EngineGroupsTest, HasNoGroupThatCouldNotBeKept) {
  vault_.answer = MakeError(Reason::kKeeperRefused, "full");
  EXPECT_THAT(groups_->Join(RequestFor("g"), kOwner), StatusIs(Reason::kKeeperRefused));
  EXPECT_THAT(groups_->List(kRoot), IsEmpty());
  vault_.answer = absl::OkStatus();
  EXPECT_THAT(groups_->Join(RequestFor("g"), kOwner), IsOk());
}

TEST_F(EngineGroupsTest, RefusesAMemberWithOtherWeightsNamingBoth) {
  ASSERT_THAT(groups_->Join(RequestFor("g"), kOwner), IsOk());
  EXPECT_THAT(groups_->Join(RequestFor("g", kOtherWeights), kOwner),
              StatusIs(Reason::kGroupMismatch, HasSubstr(kOtherWeights)));
}

TEST_F(EngineGroupsTest, RefusesAnotherTimeoutThanTheGroupHas) {
  v1::JoinGroupRequest request = RequestFor("g");
  request.mutable_heartbeat_timeout()->set_nanos(50'000'000);
  ASSERT_THAT(groups_->Join(request, kOwner), IsOk());
  EXPECT_THAT(groups_->Join(RequestFor("g"), kOwner), IsOk()) << "as the group has it";
  request.mutable_heartbeat_timeout()->set_nanos(60'000'000);
  EXPECT_THAT(groups_->Join(request, kOwner), StatusIs(Reason::kGroupMismatch, HasSubstr("50000000")));
}

TEST_F(EngineGroupsTest, RefusesTimeoutsOutOfRangeHoweverTheyAreWritten) {
  for (const auto& [seconds, nanos] : std::vector<std::pair<int64_t, int32_t>>{
           {0, 0}, {0, 19'999'999}, {61, 0}, {60, 1}, {-1, 0}, {0, -1}, {INT64_MAX, 0}, {0, INT32_MAX}}) {
    v1::JoinGroupRequest request = RequestFor("g");
    request.mutable_heartbeat_timeout()->set_seconds(seconds);
    request.mutable_heartbeat_timeout()->set_nanos(nanos);
    EXPECT_THAT(groups_->Join(request, kOwner), StatusIs(Reason::kInvalidArgument)) << seconds << " " << nanos;
  }
}

TEST_F(EngineGroupsTest, RefusesNamesThatAreNone) {
  for (const std::string& name : {std::string(), std::string(65, 'a'), std::string("a/b"), std::string("a b"),
                                  std::string("a\0b", 3), std::string("\xff")}) {
    EXPECT_THAT(groups_->Join(RequestFor(name), kOwner), StatusIs(Reason::kInvalidArgument));
  }
  EXPECT_THAT(groups_->Join(RequestFor(std::string(64, '-')), kOwner), IsOk());
}

TEST_F(EngineGroupsTest, MakesNoGroupOnWeightsThatAreNotResident) {
  EXPECT_THAT(groups_->Join(RequestFor("g", kOtherWeights), kOwner), StatusIs(Reason::kNotResident));
}

TEST_F(EngineGroupsTest, IsForItsOwnersUserAndRoot) {
  ASSERT_THAT(groups_->Join(RequestFor("g"), kOwner), IsOk());
  EXPECT_THAT(groups_->Join(RequestFor("g"), kOther), StatusIs(Reason::kAccessDenied));
  EXPECT_THAT(groups_->List(kOther), IsEmpty());
  EXPECT_THAT(groups_->Remove(Removal("g"), kOther), StatusIs(Reason::kAccessDenied));
  EXPECT_THAT(groups_->Join(RequestFor("g"), kRoot), IsOk());
}

TEST_F(EngineGroupsTest, LetsAGroupOfUsersJoinButNotRemove) {
  v1::JoinGroupRequest request = RequestFor("g");
  request.set_allowed_gid(kOther.gid);
  ASSERT_THAT(groups_->Join(request, kOwner), IsOk());
  EXPECT_THAT(groups_->Join(RequestFor("g"), kOther), IsOk());
  EXPECT_EQ(groups_->List(kOther).size(), 1U);
  EXPECT_THAT(groups_->Remove(Removal("g"), kOther), StatusIs(Reason::kAccessDenied));
}

TEST_F(EngineGroupsTest, TellsOfMembersAndTakeovers) {
  const auto joined = groups_->Join(RequestFor("g"), kOwner);
  ASSERT_THAT(joined, IsOk());
  auto first = Sit(*joined);
  ASSERT_THAT(first->WaitUntilActive(std::chrono::steady_clock::now() + std::chrono::seconds(60)), IsOk());
  const auto second = Sit(*joined);
  GroupTotals totals = groups_->Totals();
  EXPECT_EQ(totals.groups, 1);
  EXPECT_EQ(totals.members_by_role["active"], 1);
  EXPECT_EQ(totals.members_by_role["standby"], 1);

  first->Leave();
  ASSERT_THAT(second->WaitUntilActive(std::chrono::steady_clock::now() + std::chrono::seconds(60)), IsOk());
  totals = groups_->Totals();
  EXPECT_EQ(totals.members_by_role["active"], 1);
  EXPECT_EQ(totals.members_by_role["standby"], 0);
  EXPECT_EQ(totals.takeovers_by_cause["left"], 1);
  EXPECT_EQ(groups_->List(kOwner)[0].takeovers().left(), 1);
}

TEST_F(EngineGroupsTest, SaysWhatIsWrongWithAPageAndServesTheOthers) {
  const auto bad = groups_->Join(RequestFor("bad"), kOwner);
  ASSERT_THAT(groups_->Join(RequestFor("good"), kOwner), IsOk());
  const auto page = group::GroupPage::Map(bad->page->front().get());
  page->layout().term = ~uint64_t{0};
  page->layout().takeovers_died = ~uint64_t{0};
  groups_->Look();
  const auto listed = groups_->List(kOwner);
  ASSERT_EQ(listed.size(), 2U);
  EXPECT_THAT(listed[0].page_error(), HasSubstr("seat"));
  EXPECT_THAT(listed[1].page_error(), IsEmpty());
  EXPECT_EQ(groups_->Totals().takeovers_by_cause["died"], 0);
}

TEST_F(EngineGroupsTest, DoesNotRemoveAGroupThatHasMembersUnlessForced) {
  const auto joined = groups_->Join(RequestFor("g"), kOwner);
  const auto member = Sit(*joined);
  EXPECT_THAT(groups_->Remove(Removal("g"), kOwner), StatusIs(Reason::kGroupInUse));
  const auto removed = groups_->Remove(Removal("g", /*force=*/true), kOwner);
  ASSERT_THAT(removed, IsOk());
  EXPECT_EQ(removed->members_size(), 1);
  EXPECT_THAT(vault_.kept, IsEmpty());
  EXPECT_THAT(groups_->Remove(Removal("g"), kOwner), StatusIs(Reason::kGroupUnknown));
}

TEST_F(EngineGroupsTest, GoesOnInTheNextBrokerWithTheSamePage) {
  const auto joined = groups_->Join(RequestFor("g"), kOwner);
  const ino_t inode = InodeOf(joined->page->front().get());
  const auto next = Make();
  EXPECT_EQ(next->Adopt(vault_.kept), 1);
  const auto again = next->Join(RequestFor("g"), kOwner);
  ASSERT_THAT(again, IsOk());
  EXPECT_EQ(InodeOf(again->page->front().get()), inode);
}

TEST_F(EngineGroupsTest, DoesNotAdoptAPageThatIsNotTheGroups) {
  ASSERT_THAT(groups_->Join(RequestFor("g"), kOwner), IsOk());
  std::vector<KeptGroup> kept = vault_.kept;
  kept[0].fingerprint = kOtherWeights;
  const auto next = Make();
  EXPECT_EQ(next->Adopt(kept), 0);
  EXPECT_THAT(next->List(kRoot), IsEmpty());
  EXPECT_THAT(vault_.kept, IsEmpty()) << "it is forgotten";
}

// ---- The record that is kept of a group.

KeeperEntry EntryOf(const KeptGroup& group, const std::string& key) {
  KeeperEntry entry;
  entry.key = key;
  entry.value = EncodeRecord(MakeGroupRecord(group).SerializeAsString(), 1 << 20)->value;
  entry.fds.emplace_back(fcntl(group.page->front().get(), F_DUPFD_CLOEXEC, 0));
  return entry;
}

TEST_F(EngineGroupsTest, IsReadFromItsRecordAsItWasKept) {
  v1::JoinGroupRequest request = RequestFor("g");
  request.set_allowed_gid(77);
  ASSERT_THAT(groups_->Join(request, kOwner), IsOk());
  std::vector<KeeperEntry> entries;
  entries.push_back(EntryOf(vault_.kept[0], "group/g"));
  const CheckedEntries checked = CheckEntries(std::move(entries));
  EXPECT_THAT(checked.refused, IsEmpty());
  ASSERT_EQ(checked.adoption.groups.size(), 1U);
  const KeptGroup& group = checked.adoption.groups[0];
  EXPECT_EQ(group.name, "g");
  EXPECT_EQ(group.fingerprint, kWeights);
  EXPECT_EQ(group.owner_uid, kOwner.uid);
  EXPECT_EQ(group.allowed_gid, 77U);
  EXPECT_EQ(group.heartbeat_timeout, std::chrono::milliseconds(200));
  EXPECT_EQ(group.create_time, vault_.kept[0].create_time);
}

TEST_F(EngineGroupsTest, IsRefusedWhoseRecordIsOfAnotherNameOrHasNoPage) {
  ASSERT_THAT(groups_->Join(RequestFor("g"), kOwner), IsOk());
  std::vector<KeeperEntry> entries;
  entries.push_back(EntryOf(vault_.kept[0], "group/h"));
  entries.push_back(EntryOf(vault_.kept[0], "group/g"));
  entries.back().fds.clear();
  const CheckedEntries checked = CheckEntries(std::move(entries));
  EXPECT_THAT(checked.adoption.groups, IsEmpty());
  ASSERT_EQ(checked.refused.size(), 2U);
  EXPECT_THAT(checked.refused[0].cause, StatusIs(Reason::kProtocolError, HasSubstr("group g")));
  EXPECT_THAT(checked.refused[1].cause, StatusIs(Reason::kProtocolError, HasSubstr("0 descriptors")));
}

}  // namespace
}  // namespace weightbroker
