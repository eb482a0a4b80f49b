// What the reconciler does about what fails, is damaged, or is in its way.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/broker/reconciler_fixture.h"

namespace weightbroker {
namespace {

using testing::Count;
using ::testing::ElementsAre;
using testing::Hash;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::ReconcilerTest;
using ::testing::SizeIs;

// It has the right fingerprint, and a rank is missing.
TEST_F(ReconcilerTest, IsNotSatisfiedByASetOfWhichSomebodyRegisteredOtherRanksAndSaysSo) {
  min_pause_ = std::chrono::hours(1);
  BeginWithoutRankZero("a");
  Write({"a"}, {{"m@live", "a"}});
  Start();
  ASSERT_TRUE(Eventually([this] { return reconciler_->DescribeSets()[0].failed_attempts() == 1; }));
  EXPECT_FALSE(reconciler_->IsSatisfied());
  const v1::DesiredSet failed = reconciler_->DescribeSets()[0];
  EXPECT_EQ(failed.state(), v1::DesiredSet::STATE_FAILED);
  EXPECT_EQ(failed.failure().reason(), "PLACEMENT_MISMATCH");
  EXPECT_THAT(failed.failure().message(), HasSubstr("1, where 0-1 are asked for"));
  EXPECT_EQ(AliasNames("m@live"), "");
  EXPECT_FALSE(registry_->Describe(Find("a")).pinned());
  {
    MutexLock lock(mutex_);
    EXPECT_EQ(failures_["PLACEMENT_MISMATCH"], 1);
  }
  ASSERT_THAT(registry_->Release(Find("a")), IsOk());
  EXPECT_TRUE(IsReached()) << "what was in its way has gone, and with it the pause";
  EXPECT_THAT(loads(), ElementsAre("a"));
}

TEST_F(ReconcilerTest, LoadsAsAnotherSetWhatIsHeldOtherwiseOnceItsFilesHaveChangedAndTheFileIsReadAgain) {
  min_pause_ = std::chrono::milliseconds(50);
  BeginWithoutRankZero("a");
  Write({"a"});
  Start();
  ASSERT_TRUE(Eventually([this] { return reconciler_->DescribeSets()[0].failed_attempts() > 0; }));
  {
    MutexLock lock(mutex_);
    renamed_["a"] = "a2";
  }
  ASSERT_THAT(reconciler_->ReadFile(), IsOk());
  EXPECT_TRUE(IsReached());
  EXPECT_EQ(reconciler_->DescribeSets()[0].fingerprint(), Hash("a2"));
  EXPECT_EQ(registry_->View(Find("a")).state, v1::WEIGHT_SET_STATE_RESIDENT);
}

TEST_F(ReconcilerTest, TriesAModelAgainUntilItIsMendedAndGoesOnWithTheOthers) {
  {
    MutexLock lock(mutex_);
    broken_models_ = {"a"};
  }
  Write({"a", "b"});
  Start();
  ASSERT_TRUE(Eventually([this] { return reconciler_->DescribeSets()[0].failed_attempts() >= 3; }));
  ASSERT_TRUE(Eventually([this] { return StateOf(1) == v1::DesiredSet::STATE_RESIDENT; }));
  EXPECT_FALSE(reconciler_->IsSatisfied());
  const v1::DesiredSet failed = reconciler_->DescribeSets()[0];
  EXPECT_EQ(failed.state(), v1::DesiredSet::STATE_FAILED);
  EXPECT_EQ(failed.failure().reason(), "MODEL_NOT_FOUND");
  EXPECT_TRUE(failed.has_retry_time());
  {
    MutexLock lock(mutex_);
    EXPECT_GE(failures_["MODEL_NOT_FOUND"], 3);
    broken_models_ = {};
  }
  ASSERT_TRUE(IsReached());
  EXPECT_TRUE(Eventually([this] { return reconciler_->DescribeSets()[0].failed_attempts() == 0; }));
}

TEST_F(ReconcilerTest, CountsALoadThatFailsAndBeginsAnother) {
  {
    MutexLock lock(mutex_);
    loads_wait_ = true;
  }
  Write({"a"});
  Start();
  ASSERT_TRUE(Eventually([this] { return loads().size() == 1; }));
  EXPECT_TRUE(Eventually([this] { return StateOf(0) == v1::DesiredSet::STATE_LOADING; }));
  EXPECT_FALSE(reconciler_->IsSatisfied());
  {
    MutexLock lock(mutex_);
    loads_wait_ = false;
  }
  registry_->Fail(Find("a"), MakeError(Reason::kLoaderFailed, "it died"));
  ASSERT_TRUE(IsReached());
  EXPECT_THAT(loads(), ElementsAre("a", "a"));
  MutexLock lock(mutex_);
  EXPECT_EQ(failures_["LOADER_FAILED"], 1);
}

TEST_F(ReconcilerTest, PausesBeforeItLoadsAgainWhatWasDamagedAndLongerEachTime) {
  min_pause_ = std::chrono::hours(1);
  Write({"a"});
  Start();
  ASSERT_TRUE(IsReached());
  registry_->Quarantine(Find("a"), 0, "a bit has flipped");
  ASSERT_TRUE(Eventually([this] { return reconciler_->DescribeSets()[0].failed_attempts() == 1; }));
  const v1::DesiredSet damaged = reconciler_->DescribeSets()[0];
  EXPECT_EQ(damaged.state(), v1::DesiredSet::STATE_FAILED);
  EXPECT_EQ(damaged.failure().reason(), "QUARANTINED");
  EXPECT_THAT(damaged.failure().message(), HasSubstr("a bit has flipped"));
  EXPECT_TRUE(damaged.has_retry_time());
  EXPECT_EQ(Find("a"), nullptr) << "its memory is given back meanwhile";
  EXPECT_THAT(loads(), SizeIs(1));
  MutexLock lock(mutex_);
  EXPECT_EQ(failures_["QUARANTINED"], 1);
}

TEST_F(ReconcilerTest, GoesOnCountingWhatIsDamagedAgainAfterALoadThatWentWell) {
  trusted_after_ = std::chrono::hours(1);
  Write({"a"});
  Start();
  for (int times = 1; times <= 3; ++times) {
    ASSERT_TRUE(Eventually([&] { return static_cast<int>(loads().size()) == times; }));
    ASSERT_TRUE(IsReached());
    registry_->Quarantine(Find("a"), 0, "a bit has flipped");
    ASSERT_TRUE(Eventually([&] { return reconciler_->DescribeSets()[0].failed_attempts() == times; }));
  }
}

TEST_F(ReconcilerTest, KeepsThePauseOfWhatWasDamagedWhenTheFileIsReadWhileItIsReleased) {
  min_pause_ = std::chrono::hours(1);
  Write({"a"});
  on_failure_ = [this](const std::string&) {
    Write({"a", "b"});
    EXPECT_THAT(reconciler_->ReadFile(), IsOk());
  };
  Start();
  ASSERT_TRUE(IsReached());
  registry_->Quarantine(Find("a"), 0, "a bit has flipped");
  ASSERT_TRUE(Eventually([this] { return Find("b") != nullptr; }));
  const int seen = looks();
  ASSERT_TRUE(Eventually([&] { return looks() > seen + 2; }));
  EXPECT_THAT(loads(), ElementsAre("a", "b"));
  const v1::DesiredSet damaged = reconciler_->DescribeSets()[0];
  EXPECT_EQ(damaged.state(), v1::DesiredSet::STATE_FAILED);
  EXPECT_EQ(damaged.failed_attempts(), 1);
  EXPECT_EQ(damaged.failure().reason(), "QUARANTINED");
}

TEST_F(ReconcilerTest, ForgetsThatASetWasDamagedOnceItHasBeenWholeForAWhile) {
  Write({"a"});
  Start();
  ASSERT_TRUE(IsReached());
  registry_->Quarantine(Find("a"), 0, "a bit has flipped");
  ASSERT_TRUE(Eventually([this] { return loads().size() == 2; }));
  EXPECT_TRUE(Eventually([this] { return reconciler_->DescribeSets()[0].failed_attempts() == 0; }));
}

TEST_F(ReconcilerTest, SaysOnceOfEachAliasThatCannotBeSetAndShowsItUntilItCan) {
  Write({"a"});
  Start();
  ASSERT_TRUE(IsReached());
  for (const char* const by_hand : {"by@hand", "by@another"}) {
    ASSERT_THAT(registry_->SetAlias({.name = by_hand, .set = Find("a")}), IsOk());
  }
  {
    MutexLock lock(mutex_);
    broken_models_ = {"x"};  // each attempt at which is a look
  }
  ::testing::internal::CaptureStderr();
  Write({"a", "x"}, {{"m@live", "a"}, {"n@live", "a"}});
  ASSERT_THAT(reconciler_->ReadFile(), IsOk());
  const auto have_failed = [this] {
    const auto aliases = reconciler_->DescribeAliases();
    return aliases[0].has_failure() && aliases[1].has_failure();
  };
  ASSERT_TRUE(Eventually(have_failed));
  EXPECT_EQ(reconciler_->DescribeAliases()[1].failure().reason(), "TOO_MANY_REQUESTS");
  EXPECT_FALSE(reconciler_->IsSatisfied());
  const int looks = reconciler_->DescribeSets()[1].failed_attempts();
  ASSERT_TRUE(Eventually([&] { return reconciler_->DescribeSets()[1].failed_attempts() > looks + 3; }));
  for (const char* const by_hand : {"by@hand", "by@another"}) {
    ASSERT_THAT(registry_->DeleteAlias(by_hand, std::nullopt), IsOk());
  }
  {
    MutexLock lock(mutex_);
    broken_models_ = {};
  }
  ASSERT_TRUE(IsReached());
  EXPECT_TRUE(Eventually([&] { return !have_failed(); }));
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(Count(log, "event=desired.not_done subject=m@live"), 1) << log;
  EXPECT_EQ(Count(log, "event=desired.not_done subject=n@live"), 1) << log;
}

TEST_F(ReconcilerTest, KeepsThePauseOfWhatHasFailedWhenTheFileIsReadAgainUnlessItsEntryHasChanged) {
  min_pause_ = std::chrono::hours(1);
  {
    MutexLock lock(mutex_);
    broken_models_ = {"a"};
  }
  Write({"a"});
  Start();
  ASSERT_TRUE(Eventually([this] { return reconciler_->DescribeSets()[0].failed_attempts() == 1; }));
  {
    MutexLock lock(mutex_);
    broken_models_ = {};
  }
  Write({"a", "b"});
  ASSERT_THAT(reconciler_->ReadFile(), IsOk());
  ASSERT_TRUE(Eventually([this] { return StateOf(1) == v1::DesiredSet::STATE_RESIDENT; }));
  EXPECT_EQ(StateOf(0), v1::DesiredSet::STATE_FAILED);
  EXPECT_EQ(reconciler_->DescribeSets()[0].failed_attempts(), 1);
  torch_version_ = "2.11.0";
  Write({"a", "b"});
  ASSERT_THAT(reconciler_->ReadFile(), IsOk());
  EXPECT_TRUE(IsReached());
}

}  // namespace
}  // namespace weightbroker
