#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "server/broker/registry.h"
#include "tests/support/resident_set.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/broker/fake_clock.h"
#include "tests/unit/broker/fake_vault.h"
#include "tests/unit/broker/memory_plan.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using testing::FakeClock;
using testing::FakeVault;
using testing::FinishLoad;
using testing::Hash;
using testing::HasMetadata;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::IsOk;
using ::testing::Not;
using testing::PlanOf;
using testing::Refuses;
using ::testing::SizeIs;
using testing::StatusIs;

constexpr int64_t kGiB = int64_t{1} << 30;
constexpr char kGpu[] = "GPU-a";

NewWeightSet Wanted(const std::string& start, const std::string& device, bool pinned) {
  NewWeightSet wanted;
  wanted.fingerprint.hash = Hash(start);
  wanted.placement.ranks = {{0, device}};
  wanted.pins.by_caller = pinned;
  return wanted;
}

MemoryPlan PlanOn(const std::string& device, int64_t bytes) {
  return {.shards = {{.rank = 0, .device = device, .slab_bytes = bytes, .tensor_count = 1}}, .read_bytes = bytes};
}

class RegistryEvictionTest : public ::testing::Test {
 protected:
  RegistryEvictionTest() { options_.evicts_idle = true; }

  void Start() {
    options_.host_memory = [] { return HostMemory{.available_bytes = 1000 * kGiB, .limited_by = "machine"}; };
    options_.memory_limit_bytes = 10 * kGiB;
    options_.device_memory = [this](const std::string&) -> absl::StatusOr<DeviceMemory> {
      return DeviceMemory{.available_bytes = 1000 * kGiB, .limited_by = "device", .total_bytes = gpu_bytes_};
    };
    options_.clock = &clock_;
    options_.vault = &vault_;
    options_.on_evicted = [this](const v1::WeightSet& set) { evicted_.push_back(set.fingerprint().substr(0, 2)); };
    registry_ = Registry::Create(options_);
  }

  WeightSetRef Begin(const std::string& start, const std::string& device = kHostDevice, bool pinned = false) {
    return registry_->Begin(Wanted(start, device, pinned)).value().set;
  }

  WeightSetRef MakeResident(const std::string& start, int64_t bytes, const std::string& device = kHostDevice,
                            bool pinned = false) {
    const WeightSetRef set = Begin(start, device, pinned);
    FinishLoad(*registry_, set, bytes);
    clock_.Advance(std::chrono::seconds(1));
    return set;
  }

  absl::Status Grant(const std::string& start, int64_t bytes) {
    return registry_->GrantMemory(Begin(start), PlanOf(bytes, bytes, 1));
  }

  FakeClock clock_;
  FakeVault vault_;
  int64_t gpu_bytes_ = 100 * kGiB;
  std::vector<std::string> evicted_;
  RegistryOptions options_;
  std::shared_ptr<Registry> registry_;
};

TEST_F(RegistryEvictionTest, EvictsWhatWasNotUsedForLongestAndNoMoreThanNeeded) {
  Start();
  const WeightSetRef first = MakeResident("aa", 3 * kGiB);
  MakeResident("bb", 3 * kGiB);
  MakeResident("cc", 3 * kGiB);
  registry_->Acquire(first, 0, {}, nullptr).value().Drop();  // used again
  EXPECT_THAT(Grant("dd", 4 * kGiB), IsOk());
  EXPECT_THAT(evicted_, ElementsAre("bb"));
  EXPECT_EQ(registry_->Totals().reserved_bytes, 10 * kGiB);
  EXPECT_THAT(vault_.calls(), Contains("Forget 0"));
}

TEST_F(RegistryEvictionTest, LeavesTheSmallerOldOneWhereAYoungerOneIsNeededAnyway) {
  Start();
  MakeResident("aa", 1 * kGiB);
  MakeResident("bb", 8 * kGiB);
  EXPECT_THAT(Grant("cc", 8 * kGiB), IsOk());
  EXPECT_THAT(evicted_, ElementsAre("bb"));
}

TEST_F(RegistryEvictionTest, EvictsNothingIfAllTogetherWouldNotDo) {
  Start();
  MakeResident("aa", 4 * kGiB);
  const WeightSetRef held = MakeResident("bb", 4 * kGiB);
  const Lease lease = registry_->Acquire(held, 0, {}, nullptr).value();
  EXPECT_THAT(Grant("cc", 7 * kGiB),
              AllOf(StatusIs(Reason::kMemoryExhausted, HasSubstr("bb0000000000 (4294967296 bytes, 1 lease)")),
                    HasMetadata("need_bytes", std::to_string(7 * kGiB)),
                    HasMetadata("have_bytes", std::to_string(2 * kGiB)), HasMetadata("limited_by", "memory_limit")));
  EXPECT_THAT(evicted_, IsEmpty());
  EXPECT_THAT(Grant("dd", 6 * kGiB), IsOk());
  EXPECT_THAT(evicted_, ElementsAre("aa"));
}

TEST_F(RegistryEvictionTest, EvictsNeitherWhatIsPinnedNorWhatAnAliasNames) {
  Start();
  MakeResident("aa", 3 * kGiB, kHostDevice, /*pinned=*/true);
  const WeightSetRef second = MakeResident("bb", 3 * kGiB);
  const WeightSetRef third = MakeResident("cc", 3 * kGiB);
  ASSERT_THAT(registry_->SetAlias({.name = "m@live", .set = second}), IsOk());
  ASSERT_THAT(registry_->Pin(third, PinOwner::kCaller), IsOk());
  EXPECT_THAT(Grant("dd", 4 * kGiB), StatusIs(Reason::kMemoryExhausted, HasSubstr("named by an alias")));
  ASSERT_THAT(registry_->DeleteAlias("m@live", std::nullopt), IsOk());
  EXPECT_THAT(Grant("ee", 4 * kGiB), IsOk());
  EXPECT_THAT(evicted_, ElementsAre("bb"));
}

TEST_F(RegistryEvictionTest, EvictsWhatIsUnpinnedAgain) {
  Start();
  const WeightSetRef first = MakeResident("aa", 3 * kGiB, kHostDevice, /*pinned=*/true);
  MakeResident("bb", 3 * kGiB);
  ASSERT_THAT(registry_->Unpin(first, PinOwner::kCaller), IsOk());
  EXPECT_FALSE(registry_->Describe(first).pinned());
  EXPECT_THAT(Grant("cc", 6 * kGiB), IsOk());
  EXPECT_THAT(evicted_, ElementsAre("aa"));
}

TEST_F(RegistryEvictionTest, EvictsNothingThatOneOfTwoWhoPinnedItStillPins) {
  Start();
  const WeightSetRef set = MakeResident("aa", 8 * kGiB, kHostDevice, /*pinned=*/true);
  ASSERT_THAT(registry_->Pin(set, PinOwner::kDesiredState), IsOk());
  ASSERT_THAT(registry_->Unpin(set, PinOwner::kDesiredState), IsOk());
  EXPECT_TRUE(registry_->Describe(set).pinned());
  EXPECT_THAT(Grant("bb", 8 * kGiB), StatusIs(Reason::kMemoryExhausted));
  ASSERT_THAT(registry_->Unpin(set, PinOwner::kCaller), IsOk());
  EXPECT_THAT(Grant("cc", 8 * kGiB), IsOk());
}

TEST_F(RegistryEvictionTest, RefusesWhereItIsNotToEvict) {
  options_.evicts_idle = false;
  Start();
  MakeResident("aa", 8 * kGiB);
  EXPECT_THAT(
      Grant("bb", 8 * kGiB),
      AllOf(StatusIs(Reason::kMemoryExhausted,
                     HasSubstr("none is evicted for them (--eviction=refuse): unregister one, start the service "
                               "with --eviction=idle, or raise --memory_limit")),
            HasMetadata("eviction", "refuse"), HasMetadata("need_bytes", std::to_string(8 * kGiB)),
            HasMetadata("have_bytes", std::to_string(2 * kGiB)),
            HasMetadata("limit_bytes", std::to_string(10 * kGiB))));
  const auto plan = registry_->PlanRoom(PlanOf(8 * kGiB, 1, 1));
  ASSERT_THAT(plan, IsOk());
  EXPECT_FALSE(plan->fits);
  EXPECT_EQ(plan->devices[0].evictable_bytes, 8 * kGiB);
}

TEST_F(RegistryEvictionTest, SaysOfASetThatIsTooLargeByItselfThatNoOthersReleaseHelps) {
  Start();
  MakeResident("aa", 8 * kGiB);
  const absl::Status refused = Grant("bb", 11 * kGiB);
  EXPECT_THAT(refused, StatusIs(Reason::kMemoryExhausted,
                                HasSubstr("by themselves they exceed the 10737418240 bytes that there are at most, and "
                                          "no other set's release would help: raise --memory_limit, or have fewer of "
                                          "their ranks here")));
  EXPECT_THAT(std::string(refused.message()), Not(HasSubstr("unregister")));
}

TEST_F(RegistryEvictionTest, AdvisesToUnregisterNoneWhereThereIsNone) {
  Start();
  options_.memory_limit_bytes = 0;
  options_.host_memory = [] { return HostMemory{.available_bytes = 1 * kGiB, .limited_by = "cgroup"}; };
  registry_ = Registry::Create(options_);
  const absl::Status refused = Grant("bb", 2 * kGiB);
  EXPECT_THAT(refused, StatusIs(Reason::kMemoryExhausted, HasSubstr("raise the cgroup's limit")));
  EXPECT_THAT(std::string(refused.message()), Not(HasSubstr("unregister")));
}

TEST_F(RegistryEvictionTest, LimitsEachGpuToAPartOfItAndEvictsOnlyThere) {
  options_.device_memory_limit = {.percent = 10};
  Start();
  MakeResident("aa", 8 * kGiB);  // on the host, and not used for longest
  MakeResident("bb", 8 * kGiB, kGpu);
  const WeightSetRef set = Begin("cc", kGpu);
  const auto plan = registry_->PlanRoom(PlanOn(kGpu, 9 * kGiB));
  ASSERT_THAT(plan, IsOk());
  EXPECT_EQ(plan->devices[0].limited_by, "device_memory_limit");
  EXPECT_EQ(plan->devices[0].have_bytes, 2 * kGiB);
  ASSERT_THAT(plan->evictions, SizeIs(1));
  EXPECT_THAT(evicted_, IsEmpty()) << "a plan changes nothing";
  EXPECT_THAT(registry_->GrantMemory(set, PlanOn(kGpu, 9 * kGiB)), IsOk());
  EXPECT_THAT(evicted_, ElementsAre("bb"));
  EXPECT_THAT(registry_->GrantMemory(Begin("dd", kGpu), PlanOn(kGpu, 11 * kGiB)),
              AllOf(StatusIs(Reason::kMemoryExhausted), HasMetadata("limited_by", "device_memory_limit")));
}

TEST_F(RegistryEvictionTest, BeginsAnewWhatIsRegisteredWhileItIsBeingEvicted) {
  Start();
  MakeResident("aa", 8 * kGiB);
  absl::StatusOr<Registry::Begun> begun;
  std::thread registering;
  vault_.OnCall([&](const std::string& call) {
    if (call != "Forget 0" || registering.joinable()) return absl::OkStatus();
    registering = std::thread([&] { begun = registry_->Begin(Wanted("aa", kHostDevice, false)); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // most likely it waits by now, and need not
    return absl::OkStatus();
  });
  EXPECT_THAT(Grant("bb", 8 * kGiB), IsOk());
  registering.join();
  ASSERT_THAT(begun, IsOk());
  EXPECT_TRUE(begun->is_new) << "what is on its way out is nothing to join";
}

TEST_F(RegistryEvictionTest, GivesWhatIsEvictedToNobodyThoughItWasJustFound) {
  Start();
  const WeightSetRef set = MakeResident("aa", 8 * kGiB);
  vault_.OnCall([&](const std::string& call) {
    if (call != "Forget 0") return absl::OkStatus();
    EXPECT_THAT(registry_->Acquire(set, 0, {}, nullptr), StatusIs(Reason::kNotResident));
    return absl::OkStatus();
  });
  EXPECT_THAT(Grant("bb", 8 * kGiB), IsOk());
  EXPECT_THAT(evicted_, ElementsAre("aa"));
}

TEST_F(RegistryEvictionTest, SaysThatASetIsPinnedOnlyOnceTheVaultKnows) {
  Start();
  const WeightSetRef set = MakeResident("aa", 8 * kGiB);
  vault_.OnCall(Refuses("Keep 0"));
  EXPECT_THAT(registry_->Pin(set, PinOwner::kCaller), StatusIs(Reason::kKeeperRefused));
  EXPECT_FALSE(registry_->Describe(set).pinned());
  // A second one comes while the first is with the vault, which is going to refuse.
  absl::Status second;
  std::thread pinning;
  std::atomic<bool> is_first{true};
  vault_.OnCall([&](const std::string& call) {
    if (is_first.exchange(false)) pinning = std::thread([&] { second = registry_->Pin(set, PinOwner::kCaller); });
    return Refuses("Keep 0")(call);
  });
  EXPECT_THAT(registry_->Pin(set, PinOwner::kCaller), StatusIs(Reason::kKeeperRefused));
  pinning.join();
  EXPECT_THAT(second, StatusIs(Reason::kKeeperRefused));
  EXPECT_FALSE(registry_->Describe(set).pinned());
}

TEST_F(RegistryEvictionTest, SaysThatASetIsUnpinnedOnlyIfItStaysSoWhenAnotherOwnersPinFails) {
  Start();
  const WeightSetRef set = MakeResident("aa", 8 * kGiB);
  ASSERT_THAT(registry_->Pin(set, PinOwner::kDesiredState), IsOk());
  // It is unpinned while the vault, which is going to refuse, is asked to keep another owner's pin.
  absl::Status unpinned;
  std::thread unpinning;
  std::atomic<bool> is_first{true};
  vault_.OnCall([&](const std::string& call) {
    if (!is_first.exchange(false)) return absl::OkStatus();
    unpinning = std::thread([&] { unpinned = registry_->Unpin(set, PinOwner::kDesiredState); });
    while (registry_->View(set).pins.by_desired_state) std::this_thread::yield();
    return Refuses("Keep 0")(call);
  });
  EXPECT_THAT(registry_->Pin(set, PinOwner::kCaller), StatusIs(Reason::kKeeperRefused));
  unpinning.join();
  EXPECT_THAT(unpinned, IsOk());
  EXPECT_FALSE(registry_->Describe(set).pinned());
}

TEST_F(RegistryEvictionTest, GrantsMoreToAPublisherByEvicting) {
  Start();
  MakeResident("aa", 8 * kGiB);
  EXPECT_THAT(registry_->GrantMore(Begin("bb"), kHostDevice, 4 * kGiB), IsOk());
  EXPECT_THAT(evicted_, ElementsAre("aa"));
}

TEST_F(RegistryEvictionTest, KeepsWhatTheVaultCannotForget) {
  Start();
  const WeightSetRef first = MakeResident("aa", 8 * kGiB);
  vault_.OnCall(Refuses("Forget 0"));
  EXPECT_THAT(Grant("bb", 8 * kGiB), StatusIs(Reason::kKeeperRefused));
  EXPECT_EQ(registry_->View(first).state, v1::WEIGHT_SET_STATE_DRAINING);
  vault_.OnCall(nullptr);
  EXPECT_THAT(registry_->Release(first), IsOk());
}

TEST_F(RegistryEvictionTest, SaysThatMemoryOfAnEvictedSetIsHeldBySomebodyElse) {
  options_.eviction_patience = std::chrono::milliseconds(0);
  Start();
  options_.memory_limit_bytes = 0;
  int64_t available_bytes = 4 * kGiB;
  options_.host_memory = [&] { return HostMemory{.available_bytes = available_bytes, .limited_by = "machine"}; };
  registry_ = Registry::Create(options_);
  MakeResident("aa", 3 * kGiB);
  available_bytes = kGiB;
  EXPECT_THAT(Grant("bb", 2 * kGiB),
              AllOf(StatusIs(Reason::kMemoryExhausted, HasSubstr("1 weight set was evicted for it, whose memory is not "
                                                                 "free yet")),
                    HasMetadata("reserved_bytes", "0")));
  available_bytes = 4 * kGiB;
  EXPECT_THAT(Grant("cc", 2 * kGiB), IsOk());
}

}  // namespace
}  // namespace weightbroker
