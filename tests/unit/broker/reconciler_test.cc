#include "server/broker/reconciler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "tests/support/resident_set.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker {
namespace {

using ::testing::ElementsAre;
using testing::FinishLoad;
using testing::Hash;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::IsOk;
using ::testing::SizeIs;
using testing::StatusIs;
using testing::TemporaryFolder;
using testing::WriteFile;
using Json = nlohmann::json;
using State = v1::DesiredSet::State;

constexpr std::chrono::seconds kPatience(60);

int Count(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// A registry without loaders: a load is over as soon as it has begun, or when the test says so.
class ReconcilerTest : public ::testing::Test {
 protected:
  ReconcilerTest() : file_(folder_ / "sets.json") {}

  // Sets by name, each of a model of its own name.
  void Write(const std::vector<std::string>& names, const std::map<std::string, std::string>& aliases = {}) const {
    Json sets = Json::array();
    for (const std::string& name : names) {
      sets.push_back({{"name", name}, {"model", "models:" + name}, {"torch_version", torch_version_}});
    }
    WriteFile(file_, Json({{"version", 1}, {"sets", sets}, {"aliases", aliases}}).dump());
  }

  void Make() {
    reconciler_ = std::make_unique<Reconciler>(ReconcilerOptions{
        .registry = registry_,
        .file = file_,
        .find_fingerprint = [this](const v1::RegisterRequest& request) { return FindFingerprint(request); },
        .load = [this](const v1::RegisterRequest& request) { return Load(request); },
        .may_prove_to_be = [](const v1::RegisterRequest& request,
                              const WeightSetEntry& set) { return request.spec().model() == set.spec().model(); },
        .look_interval = std::chrono::milliseconds(5),
        .min_pause = min_pause_,
        .max_pause = 4 * min_pause_,
        .trusted_after = trusted_after_,
        .on_failure =
            [this](const std::string& reason) {
              MutexLock lock(mutex_);
              ++failures_[reason];
            },
        .on_read =
            [this](bool taken) {
              MutexLock lock(mutex_);
              ++reads_[taken];
            }});
  }

  void Start() {
    Make();
    ASSERT_THAT(reconciler_->ReadFile(), IsOk());
    reconciler_->Start();
  }

  bool Eventually(const std::function<bool()>& condition) const {
    const auto give_up = std::chrono::steady_clock::now() + kPatience;
    while (!condition()) {
      if (std::chrono::steady_clock::now() > give_up) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }
  bool IsReached() const {
    return Eventually([this] { return reconciler_->IsSatisfied(); });
  }

  // A model's name is its fingerprint's beginning, unless the test says otherwise.
  absl::StatusOr<std::string> FindFingerprint(const v1::RegisterRequest& request) {
    MutexLock lock(mutex_);
    const std::string name = request.spec().model().substr(7);
    if (broken_models_.count(name) > 0) return MakeError(Reason::kModelNotFound, "there is no " + name);
    return Hash(renamed_.count(name) > 0 ? renamed_.at(name) : name);
  }

  absl::StatusOr<WeightSetRef> Load(const v1::RegisterRequest& request) {
    auto fingerprint = FindFingerprint(request);
    if (!fingerprint.ok()) return fingerprint.status();
    NewWeightSet wanted;
    wanted.spec = request.spec();
    wanted.environment = request.environment();
    wanted.fingerprint.hash = *fingerprint;
    wanted.pins.by_desired_state = true;
    auto begun = registry_->Begin(std::move(wanted));
    if (!begun.ok()) return begun.status();
    MutexLock lock(mutex_);
    loads_.push_back(request.spec().model().substr(7));
    if (!loads_wait_) FinishLoad(*registry_, begun->set, 4096);
    return begun->set;
  }

  // As an earlier broker or a caller has left it.
  void BeginAs(const std::string& name, Pins pins) const {
    NewWeightSet there;
    there.spec.set_model("models:" + name);
    there.fingerprint.hash = Hash(name);
    there.pins = pins;
    FinishLoad(*registry_, registry_->Begin(std::move(there)).value().set, 4096);
  }

  WeightSetRef Find(const std::string& name) const { return registry_->Find(Hash(name)); }
  std::vector<std::string> loads() {
    MutexLock lock(mutex_);
    return loads_;
  }
  std::string AliasNames(const std::string& alias) const {
    const auto set = registry_->FindByAlias(alias);
    return set.ok() ? (*set)->fingerprint().hash : "";
  }
  State StateOf(size_t index) const { return reconciler_->DescribeSets()[index].state(); }

  const TemporaryFolder folder_;
  const std::string file_;
  const std::shared_ptr<Registry> registry_ = Registry::Create({.max_aliases = 2});
  std::string torch_version_ = "any";
  std::chrono::milliseconds min_pause_{1};
  std::chrono::milliseconds trusted_after_{0};

  Mutex mutex_;
  std::set<std::string> broken_models_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::string> renamed_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> loads_ ABSL_GUARDED_BY(mutex_);
  bool loads_wait_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<std::string, int> failures_ ABSL_GUARDED_BY(mutex_);
  std::map<bool, int> reads_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Reconciler> reconciler_;  // first to go
};

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
  registry_->TellStateObservers();
  reconciler_ = nullptr;
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

// It has the right fingerprint, and a rank is missing.
TEST_F(ReconcilerTest, IsNotSatisfiedByASetOfWhichSomebodyRegisteredOtherRanksAndSaysSo) {
  min_pause_ = std::chrono::hours(1);
  NewWeightSet partial;
  partial.fingerprint.hash = Hash("a");
  partial.placement = {.ranks = {{1}}, .world_size = 2};
  FinishLoad(*registry_, registry_->Begin(partial).value().set, 4096);
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

TEST_F(ReconcilerTest, ForgetsThatASetWasDamagedOnceItHasBeenWholeForAWhile) {
  Write({"a"});
  Start();
  ASSERT_TRUE(IsReached());
  registry_->Quarantine(Find("a"), 0, "a bit has flipped");
  ASSERT_TRUE(Eventually([this] { return loads().size() == 2; }));
  EXPECT_TRUE(Eventually([this] { return reconciler_->DescribeSets()[0].failed_attempts() == 0; }));
}

TEST_F(ReconcilerTest, PutsAnAliasBackThatSomebodyHasMoved) {
  Write({"a", "b"}, {{"m@live", "a"}});
  Start();
  ASSERT_TRUE(IsReached());
  ASSERT_THAT(registry_->SetAlias({.name = "m@live", .set = Find("b")}), IsOk());
  EXPECT_TRUE(Eventually([this] { return AliasNames("m@live") == Hash("a"); }));
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
