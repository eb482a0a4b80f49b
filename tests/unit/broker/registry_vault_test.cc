// The registry and its vault: what is written down when, and what becomes of a set when that fails.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "common/base/error.h"
#include "server/broker/registry.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/broker/fake_clock.h"
#include "tests/unit/broker/fake_vault.h"

namespace weightbroker {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using testing::FakeClock;
using testing::FakeVault;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::IsOk;
using ::testing::Not;
using testing::Refuses;
using ::testing::SizeIs;
using testing::StatusIs;

constexpr int64_t kShardBytes = 4096;

NewWeightSet Wanted(const std::string& start) {
  NewWeightSet wanted;
  wanted.spec.set_model("/models/m");
  wanted.environment.set_torch_version("any");
  wanted.fingerprint.hash = start + std::string(64 - start.size(), '0');
  wanted.placement = AllOnHost(2);
  return wanted;
}

std::shared_ptr<const Shard> MakeShard(int32_t rank) {
  auto shard = std::make_shared<Shard>();
  shard->rank = rank;
  shard->size_bytes = kShardBytes;
  shard->tensor_count = 7;
  shard->slabs.emplace_back().set_size_bytes(kShardBytes);
  shard->slab_fds = std::make_shared<const std::vector<UniqueFd>>();
  return shard;
}

class RegistryVaultTest : public ::testing::Test {
 protected:
  RegistryVaultTest()
      : registry_(Registry::Create({.host_memory =
                                        [] {
                                          return HostMemory{int64_t{1} << 40, "machine"};
                                        },
                                    .clock = &clock_,
                                    .max_generations = 2,
                                    .vault = &vault_})) {}

  WeightSetRef BeginLoad(const std::string& start = "aa") {
    const WeightSetRef set = registry_->Begin(Wanted(start)).value().set;
    EXPECT_THAT(registry_->GrantMemory(set, PlanOfBoth(kShardBytes)), IsOk());
    return set;
  }
  static MemoryPlan PlanOfBoth(int64_t shard_bytes) {
    return {.shards = {{0, kHostDevice, shard_bytes, 7}, {1, kHostDevice, shard_bytes, 7}}, .read_bytes = 1000};
  }
  absl::Status Finish(const WeightSetRef& set) {
    return registry_->MakeResident(set, {MakeShard(0), MakeShard(1)}, 1000);
  }
  WeightSetRef MakeResident(const std::string& start = "aa") {
    const WeightSetRef set = BeginLoad(start);
    EXPECT_THAT(Finish(set), IsOk());
    return set;
  }
  v1::WeightSetState StateOf(const WeightSetRef& set) { return registry_->View(set).state; }

  Adoption::Set Adopted(const std::string& start, int64_t generation) {
    Adoption::Set adopted;
    adopted.request = Wanted(start);
    adopted.shards = {MakeShard(0), MakeShard(1)};
    adopted.residency = {.generation = generation,
                         .register_time = std::chrono::system_clock::time_point(std::chrono::seconds(1000)),
                         .resident_time = std::chrono::system_clock::time_point(std::chrono::seconds(1003)),
                         .load_seconds = 3,
                         .read_bytes = 1000};
    return adopted;
  }

  FakeClock clock_;
  FakeVault vault_;
  const std::shared_ptr<Registry> registry_;
};

TEST_F(RegistryVaultTest, MakesASetResidentOnlyOnceTheVaultHasEveryShardOfIt) {
  const WeightSetRef set = BeginLoad();
  std::vector<v1::WeightSetState> states;
  vault_.OnCall([&](const std::string&) {
    states.push_back(StateOf(set));
    return absl::OkStatus();
  });
  ASSERT_THAT(Finish(set), IsOk());
  EXPECT_THAT(vault_.calls(), ElementsAre("KeepGeneration 1", "Keep 0", "Keep 1"));
  EXPECT_THAT(states, ::testing::Each(v1::WEIGHT_SET_STATE_VERIFYING));
  EXPECT_EQ(StateOf(set), v1::WEIGHT_SET_STATE_RESIDENT);
}

TEST_F(RegistryVaultTest, WritesDownTheVeryTimesAndGenerationThatItShows) {
  const WeightSetRef set = BeginLoad();
  clock_.Advance(std::chrono::seconds(2));
  vault_.OnCall([&](const std::string&) {
    clock_.Advance(std::chrono::seconds(5));  // writing down takes its time
    return absl::OkStatus();
  });
  ASSERT_THAT(Finish(set), IsOk());
  const v1::WeightSet shown = registry_->Describe(set);
  EXPECT_EQ(vault_.last_residency().generation, shown.generation());
  EXPECT_EQ(vault_.last_residency().load_seconds, shown.load_seconds());
  EXPECT_EQ(shown.load_seconds(), 2);
  EXPECT_EQ(shown.read_bytes(), 1000);
}

TEST_F(RegistryVaultTest, ForgetsEveryShardOfASetOfWhichOneWasRefused) {
  vault_.OnCall(Refuses("Keep 1"));
  const WeightSetRef set = BeginLoad();
  EXPECT_THAT(Finish(set), StatusIs(Reason::kKeeperRefused));
  EXPECT_NE(StateOf(set), v1::WEIGHT_SET_STATE_RESIDENT);
  EXPECT_THAT(vault_.calls(), ElementsAre("KeepGeneration 1", "Keep 0", "Keep 1", "Forget 0", "Forget 1"));
}

TEST_F(RegistryVaultTest, KeepsNoShardWhoseGenerationIsNotWrittenDown) {
  vault_.OnCall(Refuses("KeepGeneration 1"));
  EXPECT_THAT(Finish(BeginLoad()), StatusIs(Reason::kKeeperRefused));
  EXPECT_THAT(vault_.calls(), Not(Contains("Keep 0")));
}

TEST_F(RegistryVaultTest, WritesNothingDownOfShardsThatAreTooLarge) {
  const WeightSetRef set = registry_->Begin(Wanted("aa")).value().set;
  ASSERT_THAT(registry_->GrantMemory(set, PlanOfBoth(1)), IsOk());
  auto shard = std::make_shared<Shard>(*MakeShard(0));
  shard->size_bytes = 2 + kHugePageBytes;
  EXPECT_THAT(registry_->MakeResident(set, {shard}, 1000), StatusIs(Reason::kProtocolError));
  EXPECT_THAT(vault_.calls(), IsEmpty());
}

TEST_F(RegistryVaultTest, ForgetsASetBeforeItsMemoryIsGivenBackAndLetsNobodyInMeanwhile) {
  const WeightSetRef set = MakeResident();
  int asked = 0;
  vault_.OnCall([&](const std::string&) {
    ++asked;
    EXPECT_EQ(StateOf(set), v1::WEIGHT_SET_STATE_DRAINING);
    EXPECT_EQ(registry_->Totals().reserved_bytes, 2 * kShardBytes);
    EXPECT_THAT(registry_->Acquire(set, 0, {}, nullptr), StatusIs(Reason::kNotResident));
    return absl::OkStatus();
  });
  ASSERT_THAT(registry_->Release(set), IsOk());
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(StateOf(set), v1::WEIGHT_SET_STATE_RELEASED);
  EXPECT_EQ(registry_->Totals().reserved_bytes, 0);
}

TEST_F(RegistryVaultTest, SaysThatASetIsNotForgottenAndReleasesItAtTheNextTry) {
  const WeightSetRef set = MakeResident();
  vault_.OnCall(Refuses("Forget 1"));
  EXPECT_THAT(registry_->Release(set), StatusIs(Reason::kKeeperRefused));
  EXPECT_EQ(StateOf(set), v1::WEIGHT_SET_STATE_DRAINING);
  vault_.OnCall(nullptr);
  EXPECT_THAT(registry_->Release(set), IsOk());
  EXPECT_THAT(registry_->List(), IsEmpty());
}

TEST_F(RegistryVaultTest, ForgetsASetOnceThoughTwoReleaseItByForceAtOnce) {
  const WeightSetRef set = MakeResident();
  std::promise<void> forgetting;
  std::promise<void> go_on;
  std::atomic<int> calls{0};
  vault_.OnCall([&](const std::string& call) {
    if (call == "Forget 0" && ++calls == 1) {
      forgetting.set_value();
      go_on.get_future().wait();
    }
    return absl::OkStatus();
  });
  auto first = std::async(std::launch::async, [&] { return registry_->ReleaseByForce(set).status(); });
  forgetting.get_future().wait();
  auto second = std::async(std::launch::async, [&] { return registry_->ReleaseByForce(set).status(); });
  EXPECT_EQ(second.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  go_on.set_value();
  EXPECT_THAT(first.get(), IsOk());
  EXPECT_THAT(second.get(), IsOk());
  EXPECT_EQ(StateOf(set), v1::WEIGHT_SET_STATE_RELEASED);
  // Once more would be the shards of the set that has been loaded since.
  EXPECT_EQ(calls, 1);
}

TEST_F(RegistryVaultTest, LetsASecondReleaseTryAgainWhatTheFirstCouldNotForget) {
  const WeightSetRef set = MakeResident();
  std::promise<void> forgetting;
  std::promise<void> go_on;
  std::atomic<int> calls{0};
  vault_.OnCall([&](const std::string& call) {
    if (call != "Forget 0" || ++calls > 1) return absl::OkStatus();
    forgetting.set_value();
    go_on.get_future().wait();
    return MakeError(Reason::kKeeperRefused, "not now");
  });
  auto first = std::async(std::launch::async, [&] { return registry_->ReleaseByForce(set).status(); });
  forgetting.get_future().wait();
  auto second = std::async(std::launch::async, [&] { return registry_->ReleaseByForce(set).status(); });
  go_on.set_value();
  EXPECT_THAT(first.get(), StatusIs(Reason::kKeeperRefused));
  EXPECT_THAT(second.get(), IsOk());
  EXPECT_EQ(StateOf(set), v1::WEIGHT_SET_STATE_RELEASED);
}

TEST_F(RegistryVaultTest, ForgetsNothingThatIsLeased) {
  const WeightSetRef set = MakeResident();
  const auto lease = registry_->Acquire(set, 0, {}, nullptr);
  EXPECT_THAT(registry_->Release(set), StatusIs(Reason::kLeased));
  EXPECT_THAT(vault_.calls(), Not(Contains("Forget 0")));
}

TEST_F(RegistryVaultTest, LeavesEverythingToTheNextBrokerWhenItDrains) {
  const WeightSetRef set = MakeResident();
  registry_->BeginDrain();
  EXPECT_EQ(StateOf(set), v1::WEIGHT_SET_STATE_RELEASED);  // here
  EXPECT_THAT(vault_.calls(), Not(Contains("Forget 0")));
}

TEST_F(RegistryVaultTest, LeavesALoadThatEndsWhileItDrainsToTheNextBroker) {
  const WeightSetRef set = BeginLoad();
  registry_->BeginDrain();
  EXPECT_THAT(Finish(set), IsOk());
  EXPECT_THAT(vault_.calls(), ElementsAre("KeepGeneration 1", "Keep 0", "Keep 1"));
}

// ---- Adoption.

TEST_F(RegistryVaultTest, AdoptsASetAsItWas) {
  const auto set = registry_->Adopt(Adopted("aa", 3));
  ASSERT_THAT(set, IsOk());
  const v1::WeightSet shown = registry_->Describe(*set);
  EXPECT_EQ(shown.state(), v1::WEIGHT_SET_STATE_RESIDENT);
  EXPECT_EQ(shown.generation(), 3);
  EXPECT_EQ(shown.register_time().seconds(), 1000);
  EXPECT_EQ(shown.resident_time().seconds(), 1003);
  EXPECT_EQ(shown.load_seconds(), 3);
  EXPECT_EQ(shown.read_bytes(), 1000);
  EXPECT_TRUE(shown.has_adopt_time());
  EXPECT_THAT(shown.shards(), SizeIs(2));
  EXPECT_THAT(vault_.calls(), IsEmpty());  // which has it already
}

TEST_F(RegistryVaultTest, CountsAnAdoptedSetAsOneThatItHasLoaded) {
  ASSERT_THAT(registry_->Adopt(Adopted("aa", 1)), IsOk());
  const RegistryTotals totals = registry_->Totals();
  EXPECT_EQ(totals.resident_bytes, 2 * kShardBytes);
  EXPECT_EQ(totals.reserved_bytes, 2 * kShardBytes);
  EXPECT_EQ(totals.resident_tensors, 14);
  EXPECT_EQ(totals.lease_count, 0);
  EXPECT_EQ(totals.CountResident(), 1);
}

TEST_F(RegistryVaultTest, LeasesAndReleasesAnAdoptedSet) {
  const WeightSetRef set = registry_->Adopt(Adopted("aa", 2)).value();
  {
    const auto lease = registry_->Acquire(set, 1, {}, nullptr);
    ASSERT_THAT(lease, IsOk());
    EXPECT_EQ(lease->generation(), 2);
    EXPECT_EQ(lease->shard()->rank, 1);
  }
  EXPECT_THAT(registry_->Release(set), IsOk());
  EXPECT_THAT(vault_.calls(), ElementsAre("Forget 0", "Forget 1"));
  EXPECT_EQ(registry_->Totals().reserved_bytes, 0);
}

TEST_F(RegistryVaultTest, JoinsAnAdoptedSet) {
  const WeightSetRef set = registry_->Adopt(Adopted("aa", 2)).value();
  const auto begun = registry_->Begin(Wanted("aa"));
  ASSERT_THAT(begun, IsOk());
  EXPECT_FALSE(begun->is_new);
  EXPECT_EQ(begun->set, set);
}

TEST_F(RegistryVaultTest, AdoptsNoFingerprintTwice) {
  ASSERT_THAT(registry_->Adopt(Adopted("aa", 1)), IsOk());
  EXPECT_THAT(registry_->Adopt(Adopted("aa", 2)), StatusIs(Reason::kProtocolError));
  EXPECT_EQ(registry_->Totals().reserved_bytes, 2 * kShardBytes);
}

TEST_F(RegistryVaultTest, GoesOnCountingGenerationsWhereAnotherBrokerLeftOff) {
  registry_->AdoptGenerations({{Wanted("aa").fingerprint.hash, 5}, {Wanted("bb").fingerprint.hash, 1}});
  ASSERT_THAT(registry_->Adopt(Adopted("bb", 2)), IsOk());
  EXPECT_EQ(registry_->View(MakeResident("aa")).generation, 6);
  ASSERT_THAT(registry_->Release(registry_->Find(Wanted("bb").fingerprint.hash)), IsOk());
  EXPECT_EQ(registry_->View(MakeResident("bb")).generation, 3);
}

TEST_F(RegistryVaultTest, ForgetsTheGenerationsThatWereNotResidentForLongest) {
  for (const char* start : {"aa", "bb", "cc"}) ASSERT_THAT(registry_->Release(MakeResident(start)), IsOk());
  EXPECT_THAT(vault_.calls(), Not(Contains("ForgetGeneration aa")));
  const WeightSetRef there = MakeResident("dd");
  EXPECT_THAT(vault_.calls(), Contains("ForgetGeneration aa"));  // of the three without a set two are kept
  EXPECT_THAT(vault_.calls(), Not(Contains("ForgetGeneration bb")));
  EXPECT_EQ(registry_->View(MakeResident("bb")).generation, 2);
}

TEST_F(RegistryVaultTest, ExportsAShardInQuarantineNeverAgainAndTheOtherRanksStill) {
  const WeightSetRef set = MakeResident();

  EXPECT_TRUE(registry_->Quarantine(set, 1, "a bit has flipped").is_new);

  EXPECT_THAT(registry_->Acquire(set, 1, {}, nullptr), StatusIs(Reason::kQuarantined, HasSubstr("a bit has flipped")));
  EXPECT_THAT(registry_->Look(set, 1, {}), StatusIs(Reason::kQuarantined));
  EXPECT_THAT(registry_->Acquire(set, 0, {}, nullptr), IsOk());
  EXPECT_THAT(registry_->CheckNotQuarantined(set), StatusIs(Reason::kQuarantined, HasSubstr("rank 1")));
  EXPECT_EQ(registry_->Totals().quarantined_shards, 1);
  EXPECT_EQ(registry_->Describe(set).shards(1).quarantine(), "a bit has flipped");
  EXPECT_THAT(registry_->HealthyShards(), SizeIs(1));
}

TEST_F(RegistryVaultTest, TellsWhoHoldsAShardThatItIsInQuarantineAndTheVaultToo) {
  const WeightSetRef set = MakeResident();
  std::string told;
  const auto lease = registry_->Acquire(set, 1, {}, nullptr, [&](const std::string& why) { told += why; });
  ASSERT_THAT(lease, IsOk());
  const size_t calls_before = vault_.calls().size();

  const auto first = registry_->Quarantine(set, 1, "it is damaged");
  const auto again = registry_->Quarantine(set, 1, "it is damaged otherwise");

  EXPECT_THAT(first.kept, IsOk());
  EXPECT_FALSE(again.is_new) << "what was found first stays";
  EXPECT_EQ(told, "it is damaged");
  ASSERT_EQ(vault_.calls().size(), calls_before + 1);
  EXPECT_EQ(vault_.calls().back(), "Keep 1");
  EXPECT_TRUE(lease->held());
}

TEST_F(RegistryVaultTest, HasAShardInQuarantineThoughTheVaultCannotKeepThat) {
  const WeightSetRef set = MakeResident();
  vault_.OnCall(Refuses("Keep 0"));

  const auto result = registry_->Quarantine(set, 0, "it is damaged");

  EXPECT_TRUE(result.is_new);
  EXPECT_THAT(result.kept, StatusIs(Reason::kKeeperRefused));
  EXPECT_THAT(registry_->Look(set, 0, {}), StatusIs(Reason::kQuarantined));
}

TEST_F(RegistryVaultTest, AdoptsAShardInQuarantineAsOne) {
  Adoption::Set kept{Wanted("cc"), {MakeShard(0), MakeShard(1)}, Residency{.generation = 3}};
  kept.quarantines[1] = "found by another broker";

  const auto set = registry_->Adopt(std::move(kept));

  ASSERT_THAT(set, IsOk());
  EXPECT_THAT(registry_->Look(*set, 1, {}), StatusIs(Reason::kQuarantined, HasSubstr("found by another broker")));
  EXPECT_THAT(registry_->Look(*set, 0, {}), IsOk());
}

TEST_F(RegistryVaultTest, LetsASetWithAShardInQuarantineBeReleasedAndLoadedAnew) {
  const WeightSetRef set = MakeResident();
  registry_->Quarantine(set, 0, "it is damaged");

  ASSERT_THAT(registry_->Release(set), IsOk());
  const WeightSetRef again = MakeResident();

  EXPECT_THAT(registry_->CheckNotQuarantined(again), IsOk());
  EXPECT_EQ(registry_->View(again).generation, 2);
  EXPECT_EQ(registry_->Totals().quarantined_shards, 0);
}

}  // namespace
}  // namespace weightbroker
