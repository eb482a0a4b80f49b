#include "server/broker/reconciler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "tests/unit/broker/reconciler_fixture.h"

namespace weightbroker {
namespace {

using testing::Count;
using ::testing::ElementsAre;
using testing::Hash;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::IsOk;
using testing::ReconcilerTest;
using ::testing::SizeIs;
using testing::StatusIs;
using testing::WriteFile;

TEST_F(ReconcilerTest, LoadsInTheOrderOfTheFilePinsAndSetsAliases) {
  Write({"b", "a"}, {{"m@live", "a"}});
  Start();
  ASSERT_TRUE(IsReached());
  EXPECT_THAT(loads(), ElementsAre("b", "a"));
  EXPECT_TRUE(registry_->Describe(Find("a")).pinned());
  EXPECT_EQ(AliasNames("m@live"), Hash("a"));
  EXPECT_EQ(StateOf(0), v1::DesiredSet::STATE_RESIDENT);
  const std::vector<v1::DesiredAlias> aliases = reconciler_->DescribeAliases();
  ASSERT_THAT(aliases, SizeIs(1));
  EXPECT_TRUE(aliases[0].in_place());
  EXPECT_EQ(aliases[0].set(), "a");
}

TEST_F(ReconcilerTest, WantsNothingWithoutAFile) {
  Reconciler reconciler({.registry = registry_, .file = ""});
  ASSERT_THAT(reconciler.ReadFile(), IsOk());
  reconciler.Start();
  EXPECT_TRUE(reconciler.IsSatisfied());
  EXPECT_THAT(reconciler.DescribeSets(), IsEmpty());
}

TEST_F(ReconcilerTest, UnpinsWhatAnEarlierBrokerPinnedForAFileThatThereIsNoMore) {
  BeginAs("a", {.by_desired_state = true});
  BeginAs("b", {.by_caller = true});
  Reconciler reconciler({.registry = registry_, .file = ""});
  reconciler.Start();
  EXPECT_FALSE(registry_->Describe(Find("a")).pinned());
  EXPECT_TRUE(registry_->Describe(Find("b")).pinned());
}

// It has left the file while no broker ran.
TEST_F(ReconcilerTest, UnpinsWhatAnEarlierBrokerPinnedAndTheFileHasNoMoreAndNothingElse) {
  for (const char* const name : {"a", "b"}) BeginAs(name, {.by_desired_state = true});
  BeginAs("c", {.by_caller = true});
  BeginAs("d", {.by_caller = true, .by_desired_state = true});
  Write({"a"});
  Start();
  EXPECT_TRUE(Eventually([this] { return !registry_->Describe(Find("b")).pinned(); }));
  EXPECT_TRUE(Eventually([this] { return !registry_->View(Find("d")).pins.by_desired_state; }));
  for (const char* const name : {"a", "c", "d"}) EXPECT_TRUE(registry_->Describe(Find(name)).pinned()) << name;
}

TEST_F(ReconcilerTest, UnpinsNothingWhileTheFileCannotBeRead) {
  BeginAs("a", {.by_desired_state = true});
  WriteFile(file_, "{}");
  Make();
  EXPECT_THAT(reconciler_->ReadFile(), StatusIs(Reason::kConfigurationInvalid));
  reconciler_->Start();
  ASSERT_TRUE(Eventually([this] { return looks() > 0; }));
  EXPECT_TRUE(registry_->Describe(Find("a")).pinned());
}

TEST_F(ReconcilerTest, KeepsPinnedOnlyWhatASetWhoseModelCannotBeReadMayProveToBeAndSaysSoOnce) {
  for (const char* const name : {"a", "b"}) BeginAs(name, {.by_desired_state = true});
  {
    MutexLock lock(mutex_);
    broken_models_ = {"a"};
  }
  Write({"a"});
  ::testing::internal::CaptureStderr();
  Start();
  EXPECT_TRUE(Eventually([this] { return !registry_->Describe(Find("b")).pinned(); }));
  ASSERT_TRUE(Eventually([this] { return reconciler_->DescribeSets()[0].failed_attempts() > 3; }));
  EXPECT_TRUE(registry_->Describe(Find("a")).pinned());
  EXPECT_THAT(reconciler_->DescribeSets()[0].may_prove_to_be(), ElementsAre(Hash("a")));
  {
    MutexLock lock(mutex_);
    renamed_["a"] = "other";
    broken_models_ = {};
  }
  EXPECT_TRUE(Eventually([this] { return !registry_->Describe(Find("a")).pinned(); }));
  ASSERT_TRUE(IsReached());
  EXPECT_THAT(reconciler_->DescribeSets()[0].may_prove_to_be(), IsEmpty());
  reconciler_ = nullptr;
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(Count(log, "event=desired.stays_pinned"), 1) << log;
}

TEST_F(ReconcilerTest, IsNotSatisfiedBeforeTheFileHasBeenReadWithoutAFault) {
  WriteFile(file_, "{}");
  Make();
  EXPECT_THAT(reconciler_->ReadFile(), StatusIs(Reason::kConfigurationInvalid, HasSubstr(file_)));
  EXPECT_FALSE(reconciler_->IsSatisfied());
  EXPECT_THAT(reconciler_->failure(), StatusIs(Reason::kConfigurationInvalid));
  Write({});
  EXPECT_THAT(reconciler_->ReadFile(), IsOk());
  EXPECT_TRUE(reconciler_->IsSatisfied());
  EXPECT_THAT(reconciler_->failure(), IsOk());
}

TEST_F(ReconcilerTest, FindsWhatIsThereByItsFingerprintAndPinsIt) {
  BeginAs("a", {});
  Write({"a"});
  Start();
  ASSERT_TRUE(IsReached());
  EXPECT_TRUE(Eventually([this] { return registry_->Describe(Find("a")).pinned(); }));
  EXPECT_THAT(loads(), IsEmpty());
}

TEST_F(ReconcilerTest, LoadsAgainWhatSomebodyHasUnregistered) {
  Write({"a"}, {{"m@live", "a"}});
  Start();
  ASSERT_TRUE(IsReached());
  ASSERT_THAT(registry_->ReleaseByForce(Find("a")), IsOk());
  ASSERT_TRUE(Eventually([this] { return loads().size() == 2; }));
  ASSERT_TRUE(IsReached());
  EXPECT_EQ(AliasNames("m@live"), Hash("a"));
}

TEST_F(ReconcilerTest, CallsASetDrainingAndNotLoadingWhileEnginesHoldWhatIsLeftOfIt) {
  Write({"a", "b"});
  Start();
  ASSERT_TRUE(IsReached());
  ASSERT_THAT(registry_->SetAlias({.name = "by@hand", .set = Find("a")}), IsOk());
  auto lease = registry_->Acquire(Find("a"), 0, {}, nullptr);
  ASSERT_THAT(lease, IsOk());
  ASSERT_THAT(registry_->SetAlias(
                  {.name = "by@hand", .set = Find("b"), .expected_fingerprint = Hash("a"), .release_previous = true}),
              IsOk());
  EXPECT_EQ(StateOf(0), v1::DesiredSet::STATE_DRAINING);
  EXPECT_FALSE(reconciler_->IsSatisfied());
  lease->Drop();
  ASSERT_TRUE(IsReached());
  EXPECT_EQ(StateOf(0), v1::DesiredSet::STATE_RESIDENT);
}

TEST_F(ReconcilerTest, LoadsAgainWhatIsInQuarantineOnceNobodyHoldsIt) {
  Write({"a"}, {{"m@live", "a"}});
  Start();
  ASSERT_TRUE(IsReached());
  auto lease = registry_->Acquire(Find("a"), 0, {}, nullptr);
  ASSERT_THAT(lease, IsOk());
  registry_->Quarantine(Find("a"), 0, "a bit has flipped");
  EXPECT_FALSE(reconciler_->IsSatisfied());
  EXPECT_EQ(StateOf(0), v1::DesiredSet::STATE_QUARANTINED);
  EXPECT_THAT(loads(), SizeIs(1));  // it is held
  lease->Drop();
  ASSERT_TRUE(Eventually([this] { return loads().size() == 2; }));
  ASSERT_TRUE(IsReached());
  EXPECT_EQ(registry_->Describe(Find("a")).generation(), 2);
  EXPECT_EQ(AliasNames("m@live"), Hash("a"));
}

TEST_F(ReconcilerTest, PutsAnAliasBackThatSomebodyHasMoved) {
  Write({"a", "b"}, {{"m@live", "a"}});
  Start();
  ASSERT_TRUE(IsReached());
  ASSERT_THAT(registry_->SetAlias({.name = "m@live", .set = Find("b")}), IsOk());
  EXPECT_TRUE(Eventually([this] { return AliasNames("m@live") == Hash("a"); }));
}

TEST_F(ReconcilerTest, TakesUpWhatAFileSaysThatIsReadAgain) {
  Write({"a", "b"}, {{"m@live", "a"}});
  Start();
  ASSERT_TRUE(IsReached());
  Write({"b", "c"}, {{"m@live", "c"}});
  ASSERT_THAT(reconciler_->ReadFile(), IsOk());
  ASSERT_TRUE(Eventually([this] { return loads().size() == 3; }));
  ASSERT_TRUE(IsReached());
  EXPECT_THAT(loads(), ElementsAre("a", "b", "c"));
  EXPECT_EQ(AliasNames("m@live"), Hash("c"));
  EXPECT_TRUE(Eventually([this] { return !registry_->Describe(Find("a")).pinned(); }));
  EXPECT_EQ(registry_->View(Find("a")).state, v1::WEIGHT_SET_STATE_RESIDENT);
  EXPECT_TRUE(registry_->Describe(Find("b")).pinned());
}

TEST_F(ReconcilerTest, UnpinsWhatItPinnedOnceTheFileSaysThatItIsToBeHeldOtherwise) {
  BeginWithoutRankZero("a", {.by_desired_state = true});
  Write({"a"});
  Start();
  EXPECT_TRUE(Eventually([this] { return !registry_->Describe(Find("a")).pinned(); }));
  EXPECT_EQ(registry_->View(Find("a")).state, v1::WEIGHT_SET_STATE_RESIDENT);
  EXPECT_FALSE(reconciler_->IsSatisfied());
}

TEST_F(ReconcilerTest, LeavesAPinAloneThatSomebodySetsAfterItWasDropped) {
  Write({"a"});
  Start();
  ASSERT_TRUE(IsReached());
  Write({"b"});
  ASSERT_THAT(reconciler_->ReadFile(), IsOk());
  ASSERT_TRUE(Eventually([this] { return !registry_->Describe(Find("a")).pinned(); }));
  ASSERT_TRUE(IsReached());
  ASSERT_THAT(registry_->Pin(Find("a"), PinOwner::kCaller), IsOk());
  Write({"b", "c"});
  ASSERT_THAT(reconciler_->ReadFile(), IsOk());
  ASSERT_TRUE(IsReached());
  EXPECT_TRUE(registry_->Describe(Find("a")).pinned());
}

TEST_F(ReconcilerTest, KeepsWhatWasWantedWhenTheFileIsWrong) {
  Write({"a"});
  Start();
  ASSERT_TRUE(IsReached());
  WriteFile(file_, R"({"version": 1, "sets": 3})");
  EXPECT_THAT(reconciler_->ReadFile(), StatusIs(Reason::kConfigurationInvalid, HasSubstr("/sets")));
  EXPECT_TRUE(reconciler_->IsSatisfied());
  EXPECT_THAT(reconciler_->DescribeSets(), SizeIs(1));
  EXPECT_THAT(reconciler_->failure(), StatusIs(Reason::kConfigurationInvalid));
  MutexLock lock(mutex_);
  EXPECT_EQ(reads_[true], 1);
  EXPECT_EQ(reads_[false], 1);
}

TEST_F(ReconcilerTest, ReplacesAModelWhoseFilesHaveChangedWhenTheFileIsReadAgain) {
  Write({"a"}, {{"m@live", "a"}});
  Start();
  ASSERT_TRUE(IsReached());
  {
    MutexLock lock(mutex_);
    renamed_["a"] = "a2";
  }
  ASSERT_THAT(reconciler_->ReadFile(), IsOk());
  ASSERT_TRUE(Eventually([this] { return AliasNames("m@live") == Hash("a2"); }));
  EXPECT_TRUE(Eventually([this] { return !registry_->Describe(Find("a")).pinned(); }));
}

TEST_F(ReconcilerTest, TellsThoseWhoWatchWhenReadinessChanges) {
  Write({"a"});
  Make();
  std::atomic<int> told{0};
  std::atomic<bool> seen_satisfied{false};
  const Subscription subscription = registry_->SubscribeToStates([&] {
    ++told;
    if (reconciler_->IsSatisfied()) seen_satisfied = true;
  });
  ASSERT_THAT(reconciler_->ReadFile(), IsOk());
  EXPECT_EQ(told, 1);
  reconciler_->Start();
  EXPECT_TRUE(Eventually([&] { return seen_satisfied.load(); }));
  reconciler_ = nullptr;
}

}  // namespace
}  // namespace weightbroker
