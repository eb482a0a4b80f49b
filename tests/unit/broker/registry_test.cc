#include "server/broker/registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/support/resident_set.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/broker/fake_clock.h"
#include "tests/unit/broker/memory_plan.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::FakeClock;
using testing::Hash;
using testing::HasMetadata;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::PlanOf;
using ::testing::SizeIs;
using testing::StatusIs;

constexpr int64_t kGiB = int64_t{1} << 30;

NewWeightSet Wanted(const std::string& start, const std::string& model = "/models/m") {
  NewWeightSet wanted;
  wanted.spec.set_model(model);
  wanted.environment.set_torch_version("any");
  wanted.fingerprint.hash = Hash(start);
  return wanted;
}

std::shared_ptr<const Shard> MakeShard(int64_t size_bytes) {
  auto shard = std::make_shared<Shard>();
  shard->size_bytes = size_bytes;
  shard->tensor_count = 7;
  v1::Slab slab;
  slab.set_size_bytes(size_bytes);
  shard->slabs.push_back(slab);
  shard->slab_fds = std::make_shared<const std::vector<UniqueFd>>();
  return shard;
}

std::shared_ptr<const Shard> MakeShardOf(const RankPlacement& placed, int64_t size_bytes) {
  auto shard = std::make_shared<Shard>(*MakeShard(size_bytes));
  shard->rank = placed.rank;
  shard->device = placed.device;
  return shard;
}

// A set of several ranks: `ranks` of `world_size`.
NewWeightSet WantedRanks(const std::string& start, std::vector<RankPlacement> ranks, int32_t world_size) {
  NewWeightSet wanted = Wanted(start);
  wanted.placement.ranks = std::move(ranks);
  wanted.placement.world_size = world_size;
  return wanted;
}

MemoryPlan PlanOfEach(const std::vector<RankPlacement>& ranks, int64_t slab_bytes, int64_t read_bytes) {
  MemoryPlan plan{.shards = {}, .read_bytes = read_bytes};
  for (const RankPlacement& placed : ranks) plan.shards.push_back({placed.rank, placed.device, slab_bytes, 7});
  return plan;
}

class RegistryTest : public ::testing::Test {
 protected:
  std::shared_ptr<Registry> Make(int64_t memory_limit_bytes = 0) {
    return Registry::Create({.memory_limit_bytes = memory_limit_bytes,
                             .host_memory = [this] { return host_; },
                             .clock = &clock_,
                             .max_failed_sets = 3});
  }

  static WeightSetRef Begin(Registry& registry, const std::string& start) {
    return registry.Begin(Wanted(start)).value().set;
  }

  // A resident set of `size_bytes`.
  static WeightSetRef MakeResident(Registry& registry, const std::string& start, int64_t size_bytes = 4096) {
    const WeightSetRef set = Begin(registry, start);
    EXPECT_THAT(registry.GrantMemory(set, PlanOf(size_bytes, size_bytes, 7)), IsOk());
    EXPECT_THAT(registry.MakeResident(set, {MakeShard(size_bytes)}, size_bytes), IsOk());
    return set;
  }

  static absl::StatusOr<Lease> Acquire(Registry& registry, const WeightSetRef& set) {
    return registry.Acquire(set, 0, {}, nullptr);
  }

  HostMemory host_{.available_bytes = 100 * kGiB, .limited_by = "machine"};
  FakeClock clock_;
};

TEST_F(RegistryTest, GoesThroughTheStatesOfALoad) {
  const auto registry = Make();
  const WeightSetRef set = Begin(*registry, "aa");
  EXPECT_EQ(registry->View(set).state, v1::WEIGHT_SET_STATE_ALLOCATING);
  ASSERT_THAT(registry->GrantMemory(set, PlanOf(4096, 1000, 7)), IsOk());
  EXPECT_EQ(registry->View(set).state, v1::WEIGHT_SET_STATE_LOADING);
  clock_.Advance(std::chrono::seconds(2));
  ASSERT_THAT(registry->ReportProgress(set, v1::WEIGHT_SET_STATE_LOADING, 500), IsOk());
  EXPECT_EQ(registry->View(set).done_bytes, 500);
  EXPECT_EQ(registry->View(set).total_bytes, 1000);
  EXPECT_EQ(registry->View(set).rate_bytes_per_second, 250);
  EXPECT_EQ(registry->View(set).seconds_left, 2);
  const v1::LoadProgress progress = registry->Describe(set).progress();
  EXPECT_EQ(progress.done_bytes(), 500);
  EXPECT_EQ(progress.total_bytes(), 1000);
  EXPECT_EQ(progress.rate_bytes_per_second(), 250);
  EXPECT_EQ(progress.seconds_left(), 2);
  ASSERT_THAT(registry->ReportProgress(set, v1::WEIGHT_SET_STATE_VERIFYING, 1000), IsOk());
  ASSERT_THAT(registry->MakeResident(set, {MakeShard(4096)}, 1000), IsOk());
  const v1::WeightSet described = registry->Describe(set);
  EXPECT_EQ(described.state(), v1::WEIGHT_SET_STATE_RESIDENT);
  EXPECT_FALSE(described.has_progress());
  EXPECT_EQ(described.generation(), 1);
  EXPECT_EQ(described.load_seconds(), 2);
  EXPECT_EQ(described.read_bytes(), 1000);
  EXPECT_EQ(described.resident_time().seconds() - described.register_time().seconds(), 2);
  EXPECT_THAT(described.shards(), SizeIs(1));
}

// ---- Several ranks.

TEST_F(RegistryTest, LeasesEachRankThatItHoldsAndSaysWhichItDoesNot) {
  const auto registry = Make();
  const std::vector<RankPlacement> ranks = {{2, kHostDevice}, {3, kHostDevice}};
  const WeightSetRef set = registry->Begin(WantedRanks("aa", ranks, /*world_size=*/4)).value().set;
  ASSERT_THAT(registry->GrantMemory(set, PlanOfEach(ranks, 4096, 100)), IsOk());
  ASSERT_THAT(registry->MakeResident(set, {MakeShardOf(ranks[0], 4096), MakeShardOf(ranks[1], 4096)}, 100), IsOk());

  const auto first = registry->Acquire(set, 3, {}, nullptr);
  const auto second = registry->Acquire(set, 3, {}, nullptr);
  ASSERT_THAT(first, IsOk());
  EXPECT_EQ(first->shard()->rank, 3);
  const v1::WeightSet described = registry->Describe(set);
  ASSERT_THAT(described.shards(), SizeIs(2));
  EXPECT_EQ(described.shards(0).rank(), 2);
  EXPECT_EQ(described.shards(0).lease_count(), 0);
  EXPECT_EQ(described.shards(1).lease_count(), 2);
  EXPECT_EQ(registry->Totals().resident_shards, 2);
  EXPECT_THAT(
      registry->Acquire(set, 1, {}, nullptr),
      AllOf(StatusIs(Reason::kRankNotHere, HasSubstr("which holds 2-3 of 4")), HasMetadata("held_ranks", "2-3")));
  EXPECT_THAT(registry->Acquire(set, 4, {}, nullptr), StatusIs(Reason::kRankOutOfRange));
}

TEST_F(RegistryTest, KeepsTheWholeSetWhileOneOfItsRanksIsLeased) {
  const auto registry = Make();
  const std::vector<RankPlacement> ranks = {{0, kHostDevice}, {1, kHostDevice}};
  const WeightSetRef set = registry->Begin(WantedRanks("aa", ranks, 2)).value().set;
  ASSERT_THAT(registry->GrantMemory(set, PlanOfEach(ranks, 4096, 100)), IsOk());
  ASSERT_THAT(registry->MakeResident(set, {MakeShardOf(ranks[0], 4096), MakeShardOf(ranks[1], 4096)}, 100), IsOk());
  auto lease = registry->Acquire(set, 1, {}, nullptr);
  EXPECT_THAT(registry->Release(set), StatusIs(Reason::kLeased));
  lease->Drop();
  EXPECT_THAT(registry->Release(set), IsOk());
  EXPECT_EQ(registry->Totals().reserved_bytes, 0);
}

TEST_F(RegistryTest, GrantsMemoryOnEveryDeviceOrOnNone) {
  std::map<std::string, int64_t> available = {{"GPU-a", 10 * kGiB}, {"GPU-b", 3 * kGiB}};
  const auto registry =
      Registry::Create({.device_memory = [&](const std::string& device) -> absl::StatusOr<DeviceMemory> {
        return DeviceMemory{available.at(device), "device"};
      }});
  const std::vector<RankPlacement> ranks = {{0, "GPU-a"}, {1, "GPU-b"}};
  const WeightSetRef set = registry->Begin(WantedRanks("aa", ranks, 2)).value().set;
  EXPECT_THAT(registry->GrantMemory(set, PlanOfEach(ranks, 4 * kGiB, kGiB)),
              AllOf(StatusIs(Reason::kMemoryExhausted, HasSubstr("on GPU-b")), HasMetadata("device", "GPU-b")));
  EXPECT_EQ(registry->Totals().reserved_bytes, 0);

  available["GPU-b"] = 4 * kGiB;
  ASSERT_THAT(registry->GrantMemory(set, PlanOfEach(ranks, 4 * kGiB, kGiB)), IsOk());
  EXPECT_EQ(registry->Totals().reserved_by_device["GPU-b"], 4 * kGiB);
  EXPECT_EQ(registry->Totals().reserved_bytes, 8 * kGiB);
}

TEST_F(RegistryTest, RefusesMemoryOnADeviceThatItDoesNotHave) {
  const auto registry = Make();
  const std::vector<RankPlacement> ranks = {{0, "GPU-a"}};
  const WeightSetRef set = registry->Begin(WantedRanks("aa", ranks, 1)).value().set;
  EXPECT_THAT(registry->GrantMemory(set, PlanOfEach(ranks, 4096, 100)), StatusIs(Reason::kDeviceUnknown));
}

TEST_F(RegistryTest, RefusesAPlanWhoseSumIsNoAmountOfMemory) {
  const auto registry = Make();
  const std::vector<RankPlacement> ranks = {{0, kHostDevice}, {1, kHostDevice}};
  const WeightSetRef set = registry->Begin(WantedRanks("aa", ranks, 2)).value().set;
  EXPECT_THAT(registry->GrantMemory(set, PlanOfEach(ranks, std::numeric_limits<int64_t>::max() - 1, 100)),
              StatusIs(Reason::kProtocolError));
}

// Ranks that replicate weights take more memory than is read for them.
TEST_F(RegistryTest, CountsAsPromisedWhatALoadHasNotFilledThoughItReadsLessThanItFills) {
  const auto registry = Make();
  const std::vector<RankPlacement> ranks = {{0, kHostDevice}, {1, kHostDevice}};
  const WeightSetRef set = registry->Begin(WantedRanks("aa", ranks, 2)).value().set;
  ASSERT_THAT(registry->GrantMemory(set, PlanOfEach(ranks, 40 * kGiB, /*read_bytes=*/40 * kGiB)), IsOk());
  ASSERT_THAT(registry->ReportProgress(set, v1::WEIGHT_SET_STATE_LOADING, 20 * kGiB), IsOk());
  host_.available_bytes = 60 * kGiB;  // half of the 80 is filled
  const WeightSetRef other = Begin(*registry, "bb");
  EXPECT_THAT(registry->GrantMemory(other, PlanOf(21 * kGiB, 1, 1)), StatusIs(Reason::kMemoryExhausted));
  EXPECT_THAT(registry->GrantMemory(other, PlanOf(20 * kGiB, 1, 1)), IsOk());
}

TEST_F(RegistryTest, RefusesShardsOfOtherRanksOrOnOtherDevicesThanItsPlacements) {
  const auto registry = Make();
  const std::vector<RankPlacement> ranks = {{0, kHostDevice}, {1, kHostDevice}};
  const WeightSetRef set = registry->Begin(WantedRanks("aa", ranks, 2)).value().set;
  ASSERT_THAT(registry->GrantMemory(set, PlanOfEach(ranks, 4096, 100)), IsOk());
  const auto first = MakeShardOf(ranks[0], 4096);
  const std::vector<std::vector<std::shared_ptr<const Shard>>> wrong = {
      {}, {first}, {first, first}, {first, MakeShardOf({1, "GPU-a"}, 4096)}};
  for (const auto& shards : wrong) {
    EXPECT_THAT(registry->MakeResident(set, shards, 100), StatusIs(Reason::kProtocolError, HasSubstr("ranks 0-1")));
  }
  EXPECT_THAT(registry->MakeResident(set, {first, MakeShardOf(ranks[1], 4096)}, 100), IsOk());
}

// ---- One rank.

TEST_F(RegistryTest, JoinsTheSetThatIsThereAlready) {
  const auto registry = Make();
  const auto first = registry->Begin(Wanted("aa")).value();
  const auto second = registry->Begin(Wanted("aa")).value();
  EXPECT_TRUE(first.is_new);
  EXPECT_FALSE(second.is_new);
  EXPECT_EQ(first.set, second.set);
}

TEST_F(RegistryTest, CountsGenerationsAcrossReleases) {
  const auto registry = Make();
  ASSERT_THAT(registry->Release(MakeResident(*registry, "aa")), IsOk());
  EXPECT_EQ(registry->View(MakeResident(*registry, "aa")).generation, 2);
  EXPECT_EQ(registry->View(MakeResident(*registry, "bb")).generation, 1);
}

TEST_F(RegistryTest, ReplacesAFailedSetByANewOne) {
  const auto registry = Make();
  const WeightSetRef failed = Begin(*registry, "aa");
  registry->Fail(failed, MakeError(Reason::kLoaderFailed, "it died"));
  const auto again = registry->Begin(Wanted("aa")).value();
  EXPECT_TRUE(again.is_new);
  EXPECT_THAT(registry->List(), SizeIs(1));
  EXPECT_EQ(registry->View(failed).state, v1::WEIGHT_SET_STATE_FAILED);  // whoever followed it still sees why
}

TEST_F(RegistryTest, ListsFailedSetsWithTheirCauseAndForgetsTheOldest) {
  const auto registry = Make();
  for (const char* start : {"a1", "a2", "a3", "a4"}) {
    registry->Fail(Begin(*registry, start), MakeError(Reason::kLoaderFailed, absl::StrCat("cause of ", start)));
  }
  const auto list = registry->List();
  ASSERT_THAT(list, SizeIs(3));
  EXPECT_EQ(list.front().fingerprint(), Hash("a2"));
  EXPECT_EQ(list.back().failure().reason(), "LOADER_FAILED");
  EXPECT_EQ(list.back().failure().message(), "cause of a4");
}

TEST_F(RegistryTest, RefusesMemoryAboveTheLimitWithNeedAndHave) {
  const auto registry = Make(/*memory_limit_bytes=*/10 * kGiB);
  MakeResident(*registry, "aa", 7 * kGiB);
  const auto status = registry->GrantMemory(Begin(*registry, "bb"), PlanOf(4 * kGiB, 4 * kGiB, 1));
  EXPECT_THAT(status, StatusIs(Reason::kMemoryExhausted, HasSubstr("limited by memory_limit")));
  EXPECT_THAT(status, HasMetadata("need_bytes", absl::StrCat(4 * kGiB)));
  EXPECT_THAT(status, HasMetadata("have_bytes", absl::StrCat(3 * kGiB)));
}

TEST_F(RegistryTest, RefusesMemoryThatTheMachineDoesNotHave) {
  host_ = {.available_bytes = kGiB, .limited_by = "cgroup"};
  const auto registry = Make();
  EXPECT_THAT(registry->GrantMemory(Begin(*registry, "aa"), PlanOf(2 * kGiB, 2 * kGiB, 1)),
              AllOf(StatusIs(Reason::kMemoryExhausted), HasMetadata("limited_by", "cgroup")));
}

TEST_F(RegistryTest, GrantsReservedHugePagesWhereLittleElseIsLeft) {
  host_ = {.available_bytes = kGiB, .limited_by = "machine", .free_huge_page_bytes = 10 * kGiB};
  const auto registry = Make();
  const WeightSetRef first = Begin(*registry, "aa");
  ASSERT_THAT(registry->GrantMemory(first, PlanOf(8 * kGiB, 8 * kGiB, 1)), IsOk());
  // What the first will take is still free in the pool, and nothing of it comes out of what is available.
  EXPECT_THAT(registry->GrantMemory(Begin(*registry, "bb"), PlanOf(4 * kGiB, 4 * kGiB, 1)),
              AllOf(StatusIs(Reason::kMemoryExhausted), HasMetadata("have_bytes", absl::StrCat(kGiB))));
  // It has taken its pages once it reads.
  ASSERT_THAT(registry->ReportProgress(first, v1::WEIGHT_SET_STATE_LOADING, 0), IsOk());
  host_.free_huge_page_bytes = 2 * kGiB;
  EXPECT_THAT(registry->GrantMemory(Begin(*registry, "cc"), PlanOf(2 * kGiB, 2 * kGiB, 1)), IsOk());
  EXPECT_THAT(registry->GrantMemory(Begin(*registry, "dd"), PlanOf(kGiB, kGiB, 1)), IsOk());
}

TEST_F(RegistryTest, CountsReservedHugePagesAgainstTheMemoryLimitToo) {
  host_ = {.available_bytes = kGiB, .limited_by = "machine", .free_huge_page_bytes = 10 * kGiB};
  const auto registry = Make(/*memory_limit_bytes=*/4 * kGiB);
  EXPECT_THAT(registry->GrantMemory(Begin(*registry, "aa"), PlanOf(8 * kGiB, 8 * kGiB, 1)),
              AllOf(StatusIs(Reason::kMemoryExhausted), HasMetadata("limited_by", "memory_limit")));
}

TEST_F(RegistryTest, CountsMemoryThatALoadUnderWayWasGrantedAndHasNotFilledYet) {
  host_.available_bytes = 10 * kGiB;
  const auto registry = Make();
  const WeightSetRef first = Begin(*registry, "aa");
  ASSERT_THAT(registry->GrantMemory(first, PlanOf(8 * kGiB, 8 * kGiB, 1)), IsOk());
  const WeightSetRef second = Begin(*registry, "bb");
  EXPECT_THAT(registry->GrantMemory(second, PlanOf(4 * kGiB, 4 * kGiB, 1)),
              AllOf(StatusIs(Reason::kMemoryExhausted), HasMetadata("have_bytes", absl::StrCat(2 * kGiB))));
  ASSERT_THAT(registry->ReportProgress(first, v1::WEIGHT_SET_STATE_LOADING, 8 * kGiB), IsOk());
  EXPECT_THAT(registry->GrantMemory(second, PlanOf(4 * kGiB, 4 * kGiB, 1)), IsOk());
}

TEST_F(RegistryTest, CountsMemoryOfAGpuOnceThoughItIsTakenBeforeAByteIsRead) {
  int64_t free_bytes = 100 * kGiB;
  const auto registry = Registry::Create({.device_memory =
                                              [&](const std::string&) {
                                                return DeviceMemory{free_bytes, "device"};
                                              },
                                          .clock = &clock_});
  const std::vector<RankPlacement> on_gpu = {{0, "GPU-a"}};
  const WeightSetRef first = registry->Begin(WantedRanks("aa", on_gpu, 1)).value().set;
  const WeightSetRef second = registry->Begin(WantedRanks("bb", on_gpu, 1)).value().set;
  ASSERT_THAT(registry->GrantMemory(first, PlanOfEach(on_gpu, 60 * kGiB, 60 * kGiB)), IsOk());
  EXPECT_THAT(registry->GrantMemory(second, PlanOfEach(on_gpu, 41 * kGiB, 41 * kGiB)),
              AllOf(StatusIs(Reason::kMemoryExhausted), HasMetadata("have_bytes", absl::StrCat(40 * kGiB))));

  free_bytes = 40 * kGiB;  // the first one's loader has allocated, and says so with its first progress
  ASSERT_THAT(registry->ReportProgress(first, v1::WEIGHT_SET_STATE_LOADING, 0), IsOk());

  EXPECT_THAT(registry->GrantMemory(second, PlanOfEach(on_gpu, 41 * kGiB, 41 * kGiB)),
              AllOf(StatusIs(Reason::kMemoryExhausted), HasMetadata("have_bytes", absl::StrCat(40 * kGiB))));
  EXPECT_THAT(registry->GrantMemory(second, PlanOfEach(on_gpu, 40 * kGiB, 40 * kGiB)), IsOk());
}

TEST_F(RegistryTest, GivesMemoryBackWhenALoadFails) {
  const auto registry = Make(10 * kGiB);
  const WeightSetRef set = Begin(*registry, "aa");
  ASSERT_THAT(registry->GrantMemory(set, PlanOf(8 * kGiB, 8 * kGiB, 1)), IsOk());
  EXPECT_EQ(registry->Totals().reserved_bytes, 8 * kGiB);
  registry->Fail(set, MakeError(Reason::kLoaderFailed, "it died"));
  EXPECT_EQ(registry->Totals().reserved_bytes, 0);
}

TEST_F(RegistryTest, RefusesMovesThatTheStateDoesNotAllow) {
  const auto registry = Make();
  const WeightSetRef set = Begin(*registry, "aa");
  EXPECT_THAT(registry->ReportProgress(set, v1::WEIGHT_SET_STATE_LOADING, 1), StatusIs(Reason::kProtocolError));
  EXPECT_THAT(registry->MakeResident(set, {MakeShard(1)}, 1), StatusIs(Reason::kProtocolError));
  ASSERT_THAT(registry->GrantMemory(set, PlanOf(4096, 4096, 1)), IsOk());
  EXPECT_THAT(registry->GrantMemory(set, PlanOf(4096, 4096, 1)), StatusIs(Reason::kProtocolError));
  EXPECT_THAT(registry->ReportProgress(set, v1::WEIGHT_SET_STATE_RESIDENT, 1), StatusIs(Reason::kProtocolError));
  ASSERT_THAT(registry->ReportProgress(set, v1::WEIGHT_SET_STATE_VERIFYING, 1), IsOk());
  EXPECT_THAT(registry->ReportProgress(set, v1::WEIGHT_SET_STATE_LOADING, 2), StatusIs(Reason::kProtocolError));
}

TEST_F(RegistryTest, RefusesNegativePlans) {
  const auto registry = Make();
  EXPECT_THAT(registry->GrantMemory(Begin(*registry, "aa"), PlanOf(-1, 0, 0)), StatusIs(Reason::kProtocolError));
}

TEST_F(RegistryTest, RefusesShardsLargerThanWhatWasGranted) {
  const auto registry = Make();
  const WeightSetRef set = Begin(*registry, "aa");
  ASSERT_THAT(registry->GrantMemory(set, PlanOf(4096, 4096, 1)), IsOk());
  EXPECT_THAT(registry->MakeResident(set, {MakeShard(4096 + kHugePageBytes + 1)}, 4096),
              StatusIs(Reason::kProtocolError, HasSubstr("granted 4096")));
}

TEST_F(RegistryTest, ReservesWhatTheSlabsTakeInFactWhenTheyAreRoundedUpToPages) {
  const auto registry = Make();
  const WeightSetRef set = Begin(*registry, "aa");
  ASSERT_THAT(registry->GrantMemory(set, PlanOf(512, 512, 1)), IsOk());
  ASSERT_THAT(registry->MakeResident(set, {MakeShard(4096)}, 512), IsOk());
  EXPECT_EQ(registry->Totals().reserved_bytes, 4096);
  ASSERT_THAT(registry->Release(set), IsOk());
  EXPECT_EQ(registry->Totals().reserved_bytes, 0);
}

TEST_F(RegistryTest, NeverLetsProgressGoBackOrBeyondTheTotal) {
  const auto registry = Make();
  const WeightSetRef set = Begin(*registry, "aa");
  ASSERT_THAT(registry->GrantMemory(set, PlanOf(4096, 100, 1)), IsOk());
  ASSERT_THAT(registry->ReportProgress(set, v1::WEIGHT_SET_STATE_LOADING, 60), IsOk());
  ASSERT_THAT(registry->ReportProgress(set, v1::WEIGHT_SET_STATE_LOADING, 40), IsOk());
  EXPECT_EQ(registry->View(set).done_bytes, 60);
  ASSERT_THAT(registry->ReportProgress(set, v1::WEIGHT_SET_STATE_LOADING, 1000), IsOk());
  EXPECT_EQ(registry->View(set).done_bytes, 100);
}

TEST_F(RegistryTest, TellsSubscribersOfProgressUntilTheyLeave) {
  const auto registry = Make();
  const WeightSetRef set = Begin(*registry, "aa");
  int calls = 0;
  Subscription subscription = registry->Subscribe(set, [&] { ++calls; });
  ASSERT_THAT(registry->GrantMemory(set, PlanOf(4096, 100, 1)), IsOk());
  ASSERT_THAT(registry->ReportProgress(set, v1::WEIGHT_SET_STATE_LOADING, 1), IsOk());
  registry->ReportAlive(set);
  EXPECT_EQ(calls, 3);
  subscription.Cancel();
  registry->Fail(set, MakeError(Reason::kLoaderFailed, "it died"));
  EXPECT_EQ(calls, 3);
}

TEST_F(RegistryTest, TellsSubscribersToStatesOfStatesButNotOfProgress) {
  const auto registry = Make();
  int calls = 0;
  const Subscription subscription = registry->SubscribeToStates([&] { ++calls; });
  const WeightSetRef set = Begin(*registry, "aa");
  ASSERT_THAT(registry->GrantMemory(set, PlanOf(4096, 100, 1)), IsOk());
  EXPECT_EQ(calls, 2);
  ASSERT_THAT(registry->ReportProgress(set, v1::WEIGHT_SET_STATE_LOADING, 1), IsOk());
  EXPECT_EQ(calls, 2);
}

TEST_F(RegistryTest, ASubscriberMayAskTheRegistryFromItsCallback) {
  const auto registry = Make();
  const WeightSetRef set = Begin(*registry, "aa");
  std::vector<v1::WeightSetState> seen;
  const Subscription subscription = registry->Subscribe(set, [&] { seen.push_back(registry->View(set).state); });
  ASSERT_THAT(registry->GrantMemory(set, PlanOf(4096, 100, 1)), IsOk());
  EXPECT_THAT(seen, ElementsAre(v1::WEIGHT_SET_STATE_LOADING));
}

TEST_F(RegistryTest, GrantsNumberedLeasesOnAResidentSet) {
  const auto registry = Make();
  const WeightSetRef set = MakeResident(*registry, "aa");
  const auto first = Acquire(*registry, set);
  const auto second = Acquire(*registry, set);
  ASSERT_THAT(first, IsOk());
  ASSERT_THAT(second, IsOk());
  EXPECT_NE(first->id(), second->id());
  EXPECT_EQ(first->generation(), 1);
  EXPECT_EQ(registry->Describe(set).shards(0).lease_count(), 2);
}

TEST_F(RegistryTest, DropsALeaseWithItsHandle) {
  const auto registry = Make();
  const WeightSetRef set = MakeResident(*registry, "aa");
  {
    Lease lease = Acquire(*registry, set).value();
    const Lease moved = std::move(lease);
    EXPECT_FALSE(lease.held());  // NOLINT(bugprone-use-after-move): what a move leaves is part of the contract
    EXPECT_EQ(registry->Totals().lease_count, 1);
  }
  EXPECT_EQ(registry->Totals().lease_count, 0);
}

TEST_F(RegistryTest, RefusesLeasesOnWhatIsStillLoadingWithTheProgress) {
  const auto registry = Make();
  const WeightSetRef set = Begin(*registry, "aa");
  ASSERT_THAT(registry->GrantMemory(set, PlanOf(4096, 100, 1)), IsOk());
  ASSERT_THAT(registry->ReportProgress(set, v1::WEIGHT_SET_STATE_LOADING, 30), IsOk());
  EXPECT_THAT(Acquire(*registry, set),
              AllOf(StatusIs(Reason::kStillLoading, HasSubstr("30 of 100 bytes")), HasMetadata("state", "LOADING")));
}

TEST_F(RegistryTest, RefusesLeasesOnAFailedSetNamingTheCause) {
  const auto registry = Make();
  const WeightSetRef set = Begin(*registry, "aa");
  registry->Fail(set, MakeError(Reason::kLoaderFailed, "it died"));
  EXPECT_THAT(Acquire(*registry, set),
              AllOf(StatusIs(Reason::kNotResident, HasSubstr("it died")), HasMetadata("cause", "LOADER_FAILED")));
}

TEST_F(RegistryTest, RefusesRanksThatAreNotThere) {
  const auto registry = Make();
  const WeightSetRef set = MakeResident(*registry, "aa");
  EXPECT_THAT(registry->Acquire(set, 1, {}, nullptr), StatusIs(Reason::kRankOutOfRange));
  EXPECT_THAT(registry->Acquire(set, -1, {}, nullptr), StatusIs(Reason::kRankOutOfRange));
}

TEST_F(RegistryTest, RefusesAnotherHandleKindNamingBoth) {
  const auto registry = Make();
  const WeightSetRef set = MakeResident(*registry, "aa");
  EXPECT_THAT(registry->Acquire(set, 0, {v1::HANDLE_KIND_UNSPECIFIED}, nullptr),
              StatusIs(Reason::kHandleKindUnsupported, AllOf(HasSubstr("HOST_MEMFD"), HasSubstr("UNSPECIFIED"))));
  EXPECT_THAT(registry->Acquire(set, 0, {v1::HANDLE_KIND_UNSPECIFIED, v1::HANDLE_KIND_HOST_MEMFD}, nullptr), IsOk());
}

TEST_F(RegistryTest, LooksWithoutALease) {
  const auto registry = Make();
  const WeightSetRef set = MakeResident(*registry, "aa");
  EXPECT_THAT(registry->Look(set, 0, {}), IsOk());
  EXPECT_EQ(registry->Totals().lease_count, 0);
}

TEST_F(RegistryTest, RefusesToReleaseALeasedSetWithTheCount) {
  const auto registry = Make();
  const WeightSetRef set = MakeResident(*registry, "aa");
  const auto lease = Acquire(*registry, set);
  EXPECT_THAT(registry->Release(set), AllOf(StatusIs(Reason::kLeased), HasMetadata("lease_count", "1")));
  EXPECT_EQ(registry->View(set).state, v1::WEIGHT_SET_STATE_RESIDENT);
}

TEST_F(RegistryTest, ReleasesASetWithoutLeasesAndForgetsIt) {
  const auto registry = Make();
  const WeightSetRef set = MakeResident(*registry, "aa");
  const auto released = registry->Release(set);
  ASSERT_THAT(released, IsOk());
  EXPECT_EQ(released->set.state(), v1::WEIGHT_SET_STATE_RELEASED);
  EXPECT_EQ(registry->Totals().reserved_bytes, 0);
  EXPECT_EQ(registry->Find(Hash("aa")), nullptr);
  EXPECT_THAT(Acquire(*registry, set), StatusIs(Reason::kNotResident));
}

TEST_F(RegistryTest, ReleasesALeasedSetByForceTellingItsHolders) {
  const auto registry = Make();
  const WeightSetRef set = MakeResident(*registry, "aa");
  std::string told;
  auto lease = registry->Acquire(set, 0, {}, [&](const std::string& message) { told = message; });
  ASSERT_THAT(lease, IsOk());
  const auto released = registry->ReleaseByForce(set);
  ASSERT_THAT(released, IsOk());
  EXPECT_EQ(released->ended_leases, 1);
  EXPECT_EQ(released->set.state(), v1::WEIGHT_SET_STATE_RELEASED);
  EXPECT_THAT(told, HasSubstr("by force"));
  EXPECT_EQ(registry->Totals().lease_count, 0);
  lease->Drop();  // of no effect any more
  EXPECT_EQ(registry->Totals().lease_count, 0);
}

TEST_F(RegistryTest, FreesTheMemoryOfAReleasedSetWithItsLastHolder) {
  const auto registry = Make();
  const WeightSetRef set = Begin(*registry, "aa");
  ASSERT_THAT(registry->GrantMemory(set, PlanOf(4096, 4096, 7)), IsOk());
  std::shared_ptr<const Shard> shard = MakeShard(4096);
  const std::weak_ptr<const Shard> memory = shard;
  ASSERT_THAT(registry->MakeResident(set, {std::move(shard)}, 4096), IsOk());
  auto lease = Acquire(*registry, set);
  ASSERT_THAT(registry->ReleaseByForce(set), IsOk());
  EXPECT_FALSE(memory.expired());
  lease->Drop();
  EXPECT_TRUE(memory.expired());
}

TEST_F(RegistryTest, RefusesToReleaseALoadUnderWay) {
  const auto registry = Make();
  const WeightSetRef set = Begin(*registry, "aa");
  EXPECT_THAT(registry->Release(set), StatusIs(Reason::kStillLoading, HasSubstr("or use force, which ends the load")));
  EXPECT_THAT(registry->ReleaseByForce(set), StatusIs(Reason::kStillLoading, HasSubstr("try again")));
}

TEST_F(RegistryTest, ForgetsAFailedSetWhenItIsReleased) {
  const auto registry = Make();
  const WeightSetRef set = Begin(*registry, "aa");
  registry->Fail(set, MakeError(Reason::kLoaderFailed, "it died"));
  ASSERT_THAT(registry->Release(set), IsOk());
  EXPECT_THAT(registry->List(), SizeIs(0));
}

TEST_F(RegistryTest, DrainsTellingHoldersAndReleasesEachSetWithItsLastLease) {
  const auto registry = Make();
  const WeightSetRef leased = MakeResident(*registry, "aa");
  const WeightSetRef free = MakeResident(*registry, "bb");
  int told = 0;
  auto lease = registry->Acquire(leased, 0, {}, [&](const std::string&) { ++told; });
  ASSERT_THAT(lease, IsOk());
  registry->BeginDrain();
  EXPECT_EQ(told, 1);
  EXPECT_EQ(registry->View(free).state, v1::WEIGHT_SET_STATE_RELEASED);
  EXPECT_EQ(registry->View(leased).state, v1::WEIGHT_SET_STATE_DRAINING);
  lease->Drop();
  EXPECT_EQ(registry->View(leased).state, v1::WEIGHT_SET_STATE_RELEASED);
}

TEST_F(RegistryTest, LetsNobodyInWhileItDrains) {
  const auto registry = Make();
  const WeightSetRef set = MakeResident(*registry, "aa");
  EXPECT_THAT(registry->CheckServing(), IsOk());
  registry->BeginDrain();
  EXPECT_THAT(registry->CheckServing(), StatusIs(Reason::kDraining));
  EXPECT_THAT(registry->Begin(Wanted("bb")), StatusIs(Reason::kDraining));
  EXPECT_THAT(Acquire(*registry, set), StatusIs(Reason::kDraining));
}

TEST_F(RegistryTest, FindsASetByAPrefixThatFitsOnlyOne) {
  const auto registry = Make();
  const WeightSetRef set = Begin(*registry, "abcdef0123");
  Begin(*registry, "abcdef0199");
  EXPECT_EQ(registry->FindByPrefix("abcdef0123").value(), set);
  EXPECT_THAT(registry->FindByPrefix("abcdef01"), StatusIs(Reason::kWeightSetAmbiguous, HasSubstr(Hash("abcdef0123"))));
  EXPECT_THAT(registry->FindByPrefix("0123456789"), StatusIs(Reason::kWeightSetUnknown));
}

TEST_F(RegistryTest, RefusesPrefixesThatAreNoneOfAFingerprint) {
  const auto registry = Make();
  for (const std::string& prefix :
       {std::string("abcdef0"), std::string("ABCDEF01"), std::string("abcdef0g"), std::string(65, 'a')}) {
    EXPECT_THAT(registry->FindByPrefix(prefix), StatusIs(Reason::kInvalidArgument)) << prefix;
  }
}

TEST_F(RegistryTest, FindsSetsByModelUnlessTheyFailed) {
  const auto registry = Make();
  const WeightSetRef here = MakeResident(*registry, "aa");
  registry->Fail(Begin(*registry, "bb"), MakeError(Reason::kLoaderFailed, "it died"));
  ASSERT_THAT(registry->Begin(Wanted("cc", "/models/other")), IsOk());
  EXPECT_THAT(registry->FindByModel("/models/m"), ElementsAre(here));
}

TEST_F(RegistryTest, AddsUpWhatIsResident) {
  const auto registry = Make();
  MakeResident(*registry, "aa", 4096);
  MakeResident(*registry, "bb", 8192);
  Begin(*registry, "cc");
  const RegistryTotals totals = registry->Totals();
  EXPECT_EQ(totals.resident_bytes, 12288);
  EXPECT_EQ(totals.resident_tensors, 14);
  EXPECT_EQ(totals.CountResident(), 2);
  EXPECT_EQ(totals.CountLoads(), 1);
}

// What ThreadSanitizer is for: every kind of caller at once, on sets that come and go.
TEST_F(RegistryTest, ServesManyThreadsAtOnce) {
  const auto registry = Make();
  const Subscription states = registry->SubscribeToStates([&] { registry->Totals(); });
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) {
        const WeightSetRef set = MakeResident(*registry, absl::StrCat("a", t));
        const Subscription changes = registry->Subscribe(set, [&] { registry->View(set); });
        auto lease = registry->Acquire(set, 0, {}, [](const std::string&) {});
        registry->List();
        EXPECT_THAT(registry->ReleaseByForce(set), IsOk());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const RegistryTotals totals = registry->Totals();
  EXPECT_EQ(totals.lease_count, 0);
  EXPECT_EQ(totals.reserved_bytes, 0);
}

}  // namespace
}  // namespace weightbroker
