#include "server/endpoint/access.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;

constexpr Peer kStranger = {.uid = 4001, .gid = 4002, .pid = 1};

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

}  // namespace
}  // namespace weightbroker
