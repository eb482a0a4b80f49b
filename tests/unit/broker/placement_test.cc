// Which ranks go where: what a Register names, what it leaves open, and what cannot be.

#include "server/broker/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::HasMetadata;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;

constexpr auto kDeviceKind = static_cast<v1::HandleKind>(14);  // of GPUs, here
constexpr auto kOtherKind = static_cast<v1::HandleKind>(15);

std::vector<ServedDevice> TwoGpusAndTheHost() {
  return {{"GPU-a", {kDeviceKind}}, {"GPU-b", {kDeviceKind}}, {kHostDevice, {v1::HANDLE_KIND_HOST_MEMFD}}};
}

v1::RegisterRequest Request(const std::vector<int32_t>& ranks = {}, const std::vector<std::string>& devices = {},
                            const std::vector<v1::HandleKind>& kinds = {}) {
  v1::RegisterRequest request;
  for (const int32_t rank : ranks) request.add_ranks(rank);
  for (const std::string& device : devices) request.add_devices(device);
  for (const v1::HandleKind kind : kinds) request.add_handle_kinds(kind);
  return request;
}

TEST(Placement, HoldsEveryRankOnTheHostWhereThereIsNothingElse) {
  const auto placement = PlaceRanks(Request(), 3, HostOnly());
  ASSERT_THAT(placement, IsOk());
  EXPECT_EQ(placement->ranks, AllOnHost(3).ranks);
  EXPECT_EQ(placement->world_size, 3);
  EXPECT_EQ(placement->handle_kind, v1::HANDLE_KIND_HOST_MEMFD);
}

TEST(Placement, GivesEachRankADeviceOfItsOwnInTheirOrder) {
  const auto placement = PlaceRanks(Request(), 2, TwoGpusAndTheHost());
  ASSERT_THAT(placement, IsOk());
  EXPECT_THAT(placement->ranks, ElementsAre(RankPlacement{0, "GPU-a"}, RankPlacement{1, "GPU-b"}));
  EXPECT_EQ(placement->handle_kind, kDeviceKind);
}

TEST(Placement, TakesRanksAndDevicesInTheOrderInWhichTheyAreNamed) {
  const auto placement = PlaceRanks(Request({3, 1}, {"GPU-a", "GPU-b"}), 4, TwoGpusAndTheHost());
  ASSERT_THAT(placement, IsOk());
  EXPECT_THAT(placement->ranks, ElementsAre(RankPlacement{1, "GPU-b"}, RankPlacement{3, "GPU-a"}));
  EXPECT_EQ(placement->world_size, 4);
}

TEST(Placement, TakesTheFirstKindThatCanBeHadForAllRanks) {
  const auto on_host =
      PlaceRanks(Request({}, {}, {kOtherKind, kDeviceKind, v1::HANDLE_KIND_HOST_MEMFD}), 3, TwoGpusAndTheHost());
  ASSERT_THAT(on_host, IsOk());
  EXPECT_EQ(on_host->handle_kind, v1::HANDLE_KIND_HOST_MEMFD);  // two GPUs do not do for three ranks
  EXPECT_EQ(on_host->ranks, AllOnHost(3).ranks);
  const auto named = PlaceRanks(Request({}, {"host"}), 1, TwoGpusAndTheHost());
  ASSERT_THAT(named, IsOk());
  EXPECT_EQ(named->handle_kind, v1::HANDLE_KIND_HOST_MEMFD);
}

TEST(Placement, RefusesMoreRanksThanThereAreDevicesRatherThanFallBackUnasked) {
  EXPECT_THAT(PlaceRanks(Request(), 3, TwoGpusAndTheHost()),
              StatusIs(Reason::kInvalidArgument, HasSubstr("3 ranks are to be held, and the service has 2 devices")));
}

TEST(Placement, RefusesRanksThatTheSpecDoesNotHave) {
  for (const int32_t rank : {-1, 2}) {
    EXPECT_THAT(PlaceRanks(Request({rank}), 2, HostOnly()),
                AllOf(StatusIs(Reason::kRankOutOfRange), HasMetadata("rank_count", "2")));
  }
}

TEST(Placement, RefusesARankTwice) {
  EXPECT_THAT(PlaceRanks(Request({1, 0, 1}), 2, HostOnly()),
              StatusIs(Reason::kInvalidArgument, HasSubstr("rank 1 is named twice")));
}

TEST(Placement, RefusesFewerOrMoreDevicesThanRanks) {
  for (const auto& devices : {std::vector<std::string>{"host"}, {"host", "host", "host"}}) {
    EXPECT_THAT(PlaceRanks(Request({}, devices), 2, HostOnly()),
                StatusIs(Reason::kInvalidArgument, HasSubstr("devices are named for 2 ranks")));
  }
}

TEST(Placement, RefusesADeviceThatIsNotThereNamingThoseThatAre) {
  EXPECT_THAT(PlaceRanks(Request({}, {"GPU-c"}), 1, TwoGpusAndTheHost()),
              AllOf(StatusIs(Reason::kDeviceUnknown), HasMetadata("devices", "GPU-a, GPU-b, host")));
}

TEST(Placement, RefusesKindsThatAreNotOfferedNamingBoth) {
  EXPECT_THAT(PlaceRanks(Request({}, {}, {kOtherKind}), 1, TwoGpusAndTheHost()),
              StatusIs(Reason::kHandleKindUnsupported, AllOf(HasSubstr("HOST_MEMFD"), HasSubstr("15"))));
}

TEST(Placement, RefusesDevicesThatHaveNoKindInCommon) {
  EXPECT_THAT(PlaceRanks(Request({}, {"GPU-a", "host"}), 2, TwoGpusAndTheHost()),
              StatusIs(Reason::kHandleKindUnsupported, HasSubstr("all ranks of a set have one handle kind")));
}

TEST(Placement, RefusesMoreRanksThanAnyNodeHasInAShortSentence) {
  EXPECT_THAT(PlaceRanks(Request(std::vector<int32_t>(100'000, 0)), 1, HostOnly()),
              StatusIs(Reason::kInvalidArgument, HasSubstr("more than 4096")));
}

// ---- Joining a set that is there.

TEST(Placement, DoesForARequestThatLeavesItOpen) {
  const Placement found = {.ranks = {{2, "GPU-a"}}, .world_size = 4, .handle_kind = kDeviceKind};
  EXPECT_THAT(CheckPlacement(Request(), AllOnHost(4), found), IsOk());
  EXPECT_THAT(CheckPlacement(Request({}, {}, {v1::HANDLE_KIND_HOST_MEMFD, kDeviceKind}), AllOnHost(4), found), IsOk());
}

TEST(Placement, DoesNotForARequestThatNamesOtherRanksDevicesOrKinds) {
  const Placement found = {.ranks = {{2, "GPU-a"}}, .world_size = 4, .handle_kind = kDeviceKind};
  const Placement other_rank = {.ranks = {{1, "GPU-a"}}, .world_size = 4, .handle_kind = kDeviceKind};
  const Placement other_device = {.ranks = {{2, "GPU-b"}}, .world_size = 4, .handle_kind = kDeviceKind};
  EXPECT_THAT(CheckPlacement(Request({1}), other_rank, found),
              AllOf(StatusIs(Reason::kPlacementMismatch), HasMetadata("requested", "1"), HasMetadata("resident", "2")));
  EXPECT_THAT(CheckPlacement(Request({2}, {"GPU-b"}), other_device, found),
              StatusIs(Reason::kPlacementMismatch, HasSubstr("2: GPU-a, where 2: GPU-b")));
  EXPECT_THAT(CheckPlacement(Request({}, {}, {v1::HANDLE_KIND_HOST_MEMFD}), AllOnHost(4), found),
              StatusIs(Reason::kHandleKindUnsupported));
}

TEST(Placement, IsHeldAsARequestSaysOnlyWithAllOfItsRanksOnItsDevices) {
  const Placement found = {.ranks = {{0, "GPU-a"}, {2, "GPU-b"}}, .world_size = 4, .handle_kind = kDeviceKind};
  EXPECT_THAT(CheckHeld(Request({2, 0}), found), IsOk());
  EXPECT_THAT(CheckHeld(Request({2, 0}, {"GPU-b", "GPU-a"}), found), IsOk());
  EXPECT_THAT(CheckHeld(Request({2, 0}, {"GPU-a", "GPU-b"}), found), StatusIs(Reason::kPlacementMismatch));
  EXPECT_THAT(CheckHeld(Request(), found), StatusIs(Reason::kPlacementMismatch, HasSubstr("0, 2, where 0-3")));
  EXPECT_THAT(CheckHeld(Request({0}), found), StatusIs(Reason::kPlacementMismatch));
  EXPECT_THAT(CheckHeld(Request({0, 2}, {}, {v1::HANDLE_KIND_HOST_MEMFD}), found),
              StatusIs(Reason::kHandleKindUnsupported, HasSubstr("but only HOST_MEMFD is asked for")));
  EXPECT_THAT(CheckHeld(Request(), AllOnHost(4)), IsOk());
}

TEST(Placement, WritesRanksAsRunsForPeople) {
  EXPECT_EQ(JoinRanks(AllOnHost(1).ranks), "0");
  EXPECT_EQ(JoinRanks(AllOnHost(4).ranks), "0-3");
  EXPECT_EQ(JoinRanks(std::vector<RankPlacement>{{0, "a"}, {2, "b"}, {3, "c"}, {7, "d"}}), "0, 2-3, 7");
}

}  // namespace
}  // namespace weightbroker
