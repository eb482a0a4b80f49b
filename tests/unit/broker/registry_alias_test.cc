#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/broker/registry.h"
#include "tests/support/resident_set.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/broker/fake_clock.h"
#include "tests/unit/broker/fake_vault.h"

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
using testing::Refuses;
using ::testing::SizeIs;
using testing::StatusIs;

constexpr char kLive[] = "model@live";

class RegistryAliasTest : public ::testing::Test {
 protected:
  WeightSetRef Begin(const std::string& start) {
    NewWeightSet wanted;
    wanted.fingerprint.hash = Hash(start);
    return registry_->Begin(std::move(wanted)).value().set;
  }

  WeightSetRef MakeResident(const std::string& start) {
    const WeightSetRef set = Begin(start);
    FinishLoad(*registry_, set, 4096);
    return set;
  }

  absl::StatusOr<AliasChanged> Set(const WeightSetRef& set, bool release_previous = false) {
    return registry_->SetAlias({.name = kLive, .set = set, .release_previous = release_previous});
  }

  FakeClock clock_;
  FakeVault vault_;
  const std::shared_ptr<Registry> registry_ = Registry::Create({.host_memory =
                                                                    [] {
                                                                      return HostMemory{int64_t{1} << 40, "machine"};
                                                                    },
                                                                .clock = &clock_,
                                                                .vault = &vault_,
                                                                .max_aliases = 2});
};

TEST_F(RegistryAliasTest, NamesOneSetAndThenAnother) {
  const WeightSetRef first = MakeResident("aa");
  const WeightSetRef second = MakeResident("bb");
  ASSERT_THAT(Set(first), IsOk());
  EXPECT_EQ(registry_->FindByAlias(kLive).value(), first);
  EXPECT_THAT(registry_->Describe(first).aliases(), ElementsAre(kLive));
  const auto moved = Set(second);
  ASSERT_THAT(moved, IsOk());
  EXPECT_EQ(moved->alias.previous_fingerprint, Hash("aa"));
  EXPECT_FALSE(moved->released.has_value());
  EXPECT_EQ(registry_->FindByAlias(kLive).value(), second);
  EXPECT_EQ(registry_->View(first).state, v1::WEIGHT_SET_STATE_RESIDENT) << "it stays for rolling back";
  EXPECT_THAT(vault_.calls(), Contains("KeepAlias model@live bb"));
}

TEST_F(RegistryAliasTest, IsUnknownWithItsNearestNames) {
  EXPECT_THAT(registry_->FindByAlias(kLive), StatusIs(Reason::kAliasUnknown, HasSubstr("there are none")));
  ASSERT_THAT(Set(MakeResident("aa")), IsOk());
  EXPECT_THAT(registry_->FindByAlias("model@life"),
              AllOf(StatusIs(Reason::kAliasUnknown), HasMetadata("nearest", kLive)));
}

TEST_F(RegistryAliasTest, IsNotComparedWithOthersIfItCannotBeAName) {
  ASSERT_THAT(Set(MakeResident("aa")), IsOk());
  const std::string endless = std::string(1 << 20, 'm') + "@live";
  EXPECT_THAT(registry_->FindByAlias(endless), StatusIs(Reason::kInvalidArgument));
  EXPECT_THAT(registry_->DeleteAlias(endless, std::nullopt), StatusIs(Reason::kInvalidArgument));
}

TEST_F(RegistryAliasTest, NamesOnlyWhatIsResidentAndOnlyInThatForm) {
  EXPECT_THAT(Set(Begin("aa")), StatusIs(Reason::kNotResident));
  const WeightSetRef set = MakeResident("bb");
  for (const char* name : {"live", "@live", "model@", "a@b@c", "models:m@live", "a/b@live"}) {
    EXPECT_THAT(registry_->SetAlias({.name = name, .set = set}), StatusIs(Reason::kInvalidArgument)) << name;
  }
  ASSERT_THAT(registry_->SetAlias({.name = "a@1", .set = set}), IsOk());
  ASSERT_THAT(registry_->SetAlias({.name = "a@2", .set = set}), IsOk());
  EXPECT_THAT(registry_->SetAlias({.name = "a@3", .set = set}), StatusIs(Reason::kTooManyRequests));
}

TEST_F(RegistryAliasTest, IsMovedOnlyFromWhereItIsExpected) {
  const WeightSetRef first = MakeResident("aa");
  const WeightSetRef second = MakeResident("bb");
  AliasChange change{.name = kLive, .set = first, .expected_fingerprint = Hash("cc")};
  EXPECT_THAT(registry_->SetAlias(change), StatusIs(Reason::kAliasConflict, HasSubstr("names none")));
  change.expected_fingerprint = "";
  ASSERT_THAT(registry_->SetAlias(change), IsOk());
  EXPECT_THAT(registry_->SetAlias(change), IsOk()) << "what is so already is left so";
  change.set = second;
  EXPECT_THAT(registry_->SetAlias(change),
              AllOf(StatusIs(Reason::kAliasConflict), HasMetadata("found", Hash("aa")), HasMetadata("expected", "")));
  EXPECT_THAT(registry_->DeleteAlias(kLive, Hash("bb")), StatusIs(Reason::kAliasConflict));
  EXPECT_THAT(registry_->DeleteAlias(kLive, Hash("aa")), IsOk());
  EXPECT_THAT(registry_->Aliases(), IsEmpty());
}

TEST_F(RegistryAliasTest, TellsThoseWhoHoldTheOtherSetAndNobodyElse) {
  const WeightSetRef first = MakeResident("aa");
  const WeightSetRef second = MakeResident("bb");
  ASSERT_THAT(Set(first), IsOk());
  const Lease followed = registry_->Acquire(first, 0, {}, nullptr).value();
  const Lease by_fingerprint = registry_->Acquire(first, 0, {}, nullptr).value();
  std::vector<std::string> told;
  const auto tell = [&](const std::string& alias, const std::string& fingerprint) {
    told.push_back(absl::StrCat(alias, " ", fingerprint.substr(0, 2)));
  };
  registry_->Follow(followed, kLive, tell);
  EXPECT_EQ(Set(second)->superseded_leases, 1);
  EXPECT_THAT(told, ElementsAre("model@live bb"));
  // Who comes too late to be told is told at once.
  const Lease late = registry_->Acquire(first, 0, {}, nullptr).value();
  registry_->Follow(late, kLive, tell);
  EXPECT_THAT(told, SizeIs(2));
}

TEST_F(RegistryAliasTest, ReleasesWhatItNamedBeforeWhenTheLastLeaseEnds) {
  const WeightSetRef first = MakeResident("aa");
  const WeightSetRef second = MakeResident("bb");
  ASSERT_THAT(Set(first), IsOk());
  Lease lease = registry_->Acquire(first, 0, {}, nullptr).value();
  const auto moved = Set(second, /*release_previous=*/true);
  ASSERT_THAT(moved, IsOk());
  EXPECT_EQ(moved->released->state(), v1::WEIGHT_SET_STATE_DRAINING);
  EXPECT_THAT(vault_.calls(), Contains("Forget 0"));
  EXPECT_THAT(registry_->Acquire(first, 0, {}, nullptr), StatusIs(Reason::kNotResident));
  lease.Drop();
  EXPECT_EQ(registry_->View(first).state, v1::WEIGHT_SET_STATE_RELEASED);
  EXPECT_EQ(registry_->Totals().reserved_bytes, 4096);
}

TEST_F(RegistryAliasTest, ReleasesWhatItNamedBeforeAlsoIfTheCallIsMadeAgain) {
  const WeightSetRef first = MakeResident("aa");
  const WeightSetRef second = MakeResident("bb");
  ASSERT_THAT(Set(first), IsOk());
  ASSERT_THAT(Set(second), IsOk());  // and then the broker ended
  EXPECT_EQ(Set(second, /*release_previous=*/true)->released->state(), v1::WEIGHT_SET_STATE_RELEASED);
  EXPECT_EQ(registry_->View(first).state, v1::WEIGHT_SET_STATE_RELEASED);
  EXPECT_FALSE(Set(second, /*release_previous=*/true)->released.has_value()) << "there is none any more";
  Begin("aa");
  EXPECT_FALSE(Set(second, /*release_previous=*/true)->released.has_value()) << "what is being loaded is another";
}

TEST_F(RegistryAliasTest, KeepsASetThatIsBeingReleasedFromBeingRegisteredAnewWhileItIsHeld) {
  const WeightSetRef first = MakeResident("aa");
  ASSERT_THAT(Set(first), IsOk());
  Lease lease = registry_->Acquire(first, 0, {}, nullptr).value();
  ASSERT_THAT(Set(MakeResident("bb"), /*release_previous=*/true), IsOk());
  NewWeightSet again;
  again.fingerprint.hash = Hash("aa");
  EXPECT_THAT(registry_->Begin(again), AllOf(StatusIs(Reason::kLeased), HasMetadata("lease_count", "1")));
  EXPECT_THAT(registry_->CheckNotDraining(first), StatusIs(Reason::kLeased));
  lease.Drop();
  EXPECT_TRUE(registry_->Begin(again)->is_new);
}

TEST_F(RegistryAliasTest, DoesNotReleaseWhatAnotherAliasNames) {
  const WeightSetRef first = MakeResident("aa");
  const WeightSetRef second = MakeResident("bb");
  ASSERT_THAT(Set(first), IsOk());
  ASSERT_THAT(registry_->SetAlias({.name = "model@old", .set = first}), IsOk());
  EXPECT_THAT(Set(second, /*release_previous=*/true), StatusIs(Reason::kAliased, HasSubstr("model@old")));
  EXPECT_EQ(registry_->FindByAlias(kLive).value(), first) << "and nothing has changed";
}

TEST_F(RegistryAliasTest, KeepsItsSetFromBeingUnregisteredButForForce) {
  const WeightSetRef set = MakeResident("aa");
  ASSERT_THAT(Set(set), IsOk());
  EXPECT_THAT(registry_->Release(set), AllOf(StatusIs(Reason::kAliased), HasMetadata("aliases", kLive)));
  EXPECT_THAT(registry_->ReleaseByForce(set), IsOk());
  EXPECT_THAT(registry_->Aliases(), IsEmpty());
  EXPECT_THAT(vault_.calls(), Contains("ForgetAlias model@live"));
}

TEST_F(RegistryAliasTest, IsNotMovedIfTheVaultDoesNotKnow) {
  const WeightSetRef first = MakeResident("aa");
  const WeightSetRef second = MakeResident("bb");
  ASSERT_THAT(Set(first), IsOk());
  vault_.OnCall(Refuses("KeepAlias model@live bb"));
  EXPECT_THAT(Set(second), StatusIs(Reason::kKeeperRefused));
  EXPECT_EQ(registry_->FindByAlias(kLive).value(), first);
}

TEST_F(RegistryAliasTest, TellsTheVaultAgainWhatIsSoIfItsSetIsReleasedMeanwhile) {
  const WeightSetRef first = MakeResident("aa");
  const WeightSetRef second = MakeResident("bb");
  ASSERT_THAT(Set(first), IsOk());
  vault_.OnCall([&](const std::string& call) {
    return call == "KeepAlias model@live bb" ? registry_->ReleaseByForce(second).status() : absl::OkStatus();
  });
  EXPECT_THAT(Set(second), StatusIs(Reason::kNotResident));
  EXPECT_EQ(registry_->FindByAlias(kLive).value(), first);
  EXPECT_EQ(vault_.calls().back(), "KeepAlias model@live aa");
}

TEST_F(RegistryAliasTest, IsAdoptedWithItsSetOrNotAtAll) {
  MakeResident("aa");
  EXPECT_THAT(registry_->AdoptAlias({"model@gone", Hash("bb")}), StatusIs(Reason::kNotResident));
  ASSERT_THAT(registry_->AdoptAlias({kLive, Hash("aa"), Hash("bb")}), IsOk());
  EXPECT_EQ(registry_->Aliases().at(0).previous_fingerprint, Hash("bb"));
}

}  // namespace
}  // namespace weightbroker
