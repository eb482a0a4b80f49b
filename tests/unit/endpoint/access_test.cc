#include "server/endpoint/access.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <utility>

#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;

const Peer kStranger = {.uid = 4001, .gid = 4002, .pid = 1};

TEST(AccessPolicy, LetsEveryoneInWhenItListsNobody) { EXPECT_THAT(CheckAccess({}, kStranger, {}), IsOk()); }

TEST(AccessPolicy, LetsListedUsersInAndRefusesOthersNamingThem) {
  EXPECT_THAT(CheckAccess({.allowed_uids = {4001}, .allowed_gids = {}}, kStranger, {}), IsOk());

  const absl::Status refused = CheckAccess({.allowed_uids = {4003}, .allowed_gids = {}}, kStranger, {});

  EXPECT_THAT(refused, StatusIs(Reason::kAccessDenied, HasSubstr("user 4001 (group 4002)")));
  EXPECT_THAT(refused, HasMetadata("uid", "4001"));
}

TEST(AccessPolicy, LetsMembersOfListedGroupsInPrimaryOrSupplementary) {
  EXPECT_THAT(CheckAccess({.allowed_uids = {}, .allowed_gids = {4002}}, kStranger, {}), IsOk());
  EXPECT_THAT(CheckAccess({.allowed_uids = {}, .allowed_gids = {5000}}, kStranger, {4999, 5000}), IsOk());
  EXPECT_THAT(CheckAccess({.allowed_uids = {}, .allowed_gids = {5001}}, kStranger, {4999, 5000}),
              StatusIs(Reason::kAccessDenied));
}

TEST(AccessPolicy, DoesNotTakeAUidForAGid) {
  EXPECT_THAT(CheckAccess({.allowed_uids = {}, .allowed_gids = {4001}}, kStranger, {}),
              StatusIs(Reason::kAccessDenied));
  EXPECT_THAT(CheckAccess({.allowed_uids = {4002}, .allowed_gids = {}}, kStranger, {}),
              StatusIs(Reason::kAccessDenied));
}

TEST(AccessPolicy, AlwaysLetsRootAndTheServiceItselfIn) {
  const AccessPolicy policy = {.allowed_uids = {4003}, .allowed_gids = {}};

  EXPECT_THAT(CheckAccess(policy, {.uid = 0, .gid = 0, .pid = 1}, {}), IsOk());
  EXPECT_THAT(CheckAccess(policy, {.uid = geteuid(), .gid = 9, .pid = 1}, {}), IsOk());
}

AccessPolicy OnlyFor(Operation operation, UserList users) {
  AccessPolicy policy;
  policy.operations[static_cast<size_t>(operation)] = std::move(users);
  return policy;
}

TEST(AccessPolicy, LetsWhoeverMayConnectDoEverythingWhereItListsNobody) {
  for (const Operation operation :
       {Operation::kRead, Operation::kRegister, Operation::kPublish, Operation::kAdminister}) {
    EXPECT_THAT(CheckOperation({}, operation, kStranger), IsOk());
  }
}

TEST(AccessPolicy, RefusesAnOperationNamingItTheUserAndTheFlag) {
  const AccessPolicy policy = OnlyFor(Operation::kAdminister, {.uids = {4003}, .gids = {}});

  const absl::Status refused = CheckOperation(policy, Operation::kAdminister, kStranger);

  EXPECT_THAT(refused, StatusIs(Reason::kAccessDenied, HasSubstr("user 4001 (group 4002) may not admin here")));
  EXPECT_THAT(refused, HasMetadata("operation", "admin"));
  EXPECT_THAT(refused, HasMetadata("flag", "admin_uids"));
  EXPECT_THAT(CheckOperation(policy, Operation::kRead, kStranger), IsOk()) << "each operation has its own list";
}

TEST(AccessPolicy, LetsListedUsersAndMembersOfListedGroupsDoAnOperation) {
  EXPECT_THAT(
      CheckOperation(OnlyFor(Operation::kPublish, {.uids = {4001}, .gids = {}}), Operation::kPublish, kStranger),
      IsOk());
  EXPECT_THAT(
      CheckOperation(OnlyFor(Operation::kPublish, {.uids = {}, .gids = {4002}}), Operation::kPublish, kStranger),
      IsOk());
  Peer member = kStranger;
  member.details = std::make_shared<const PeerDetails>(PeerDetails{.groups = {5000}, .program = "engine"});
  const AccessPolicy by_group = OnlyFor(Operation::kPublish, {.uids = {}, .gids = {5000}});
  EXPECT_THAT(CheckOperation(by_group, Operation::kPublish, member), IsOk());
  EXPECT_THAT(CheckOperation(by_group, Operation::kPublish, kStranger), StatusIs(Reason::kAccessDenied));
}

TEST(AccessPolicy, AlwaysLetsRootAndTheServiceItselfDoEverything) {
  const AccessPolicy policy = OnlyFor(Operation::kRegister, {.uids = {4003}, .gids = {}});

  EXPECT_THAT(CheckOperation(policy, Operation::kRegister, {.uid = 0, .gid = 0, .pid = 1}), IsOk());
  EXPECT_THAT(CheckOperation(policy, Operation::kRegister, {.uid = geteuid(), .gid = 9, .pid = 1}), IsOk());
}

}  // namespace
}  // namespace weightbroker
