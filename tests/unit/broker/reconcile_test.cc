#include "server/broker/reconcile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace weightbroker {

void PrintTo(const ReconcileAction& action, std::ostream* out) {
  constexpr const char* kNames[] = {"unpin", "release", "load", "pin", "alias"};
  *out << kNames[static_cast<size_t>(action.kind)] << " " << action.set << " " << action.fingerprint << " "
       << action.alias;
}

namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Kind = ReconcileAction::Kind;
using Phase = ActualSet::Phase;

constexpr ActualSet kResident = {.phase = Phase::kResident, .pinned = true};

ActualState SetsOnly(std::map<std::string, ActualSet> sets) { return {.sets = std::move(sets), .aliases = {}}; }

WantedState Want(const std::vector<std::string>& fingerprints) {
  WantedState wanted;
  for (const std::string& fingerprint : fingerprints) wanted.sets.push_back({fingerprint});
  return wanted;
}

ReconcileAction Load(size_t set, const std::string& fingerprint) {
  return {.kind = Kind::kLoad, .set = set, .fingerprint = fingerprint};
}

TEST(Reconcile, LoadsTheFirstThatIsMissingAndNoMoreAtATime) {
  WantedState wanted = Want({"a", "b", "c"});
  EXPECT_THAT(Reconcile(wanted, SetsOnly({{"a", kResident}})), ElementsAre(Load(1, "b")));
  const ActualSet loading = {.phase = Phase::kLoading, .pinned = true};
  EXPECT_THAT(Reconcile(wanted, SetsOnly({{"a", kResident}, {"b", loading}})), IsEmpty());
}

TEST(Reconcile, GoesOnWithTheNextWhileOnePausesOrIsNotKnown) {
  WantedState wanted = Want({"a", "", "c"});
  wanted.sets[0].may_try = false;
  EXPECT_THAT(Reconcile(wanted, {}), ElementsAre(Load(2, "c")));
}

TEST(Reconcile, WaitsForASetThatIsBeingReleased) {
  const ActualSet draining = {.phase = Phase::kDraining, .pinned = true};
  EXPECT_THAT(Reconcile(Want({"a"}), SetsOnly({{"a", draining}})), IsEmpty());
}

TEST(Reconcile, PinsWhatItFindsThere) {
  const ActualSet evictable = {.phase = Phase::kResident, .pinned = false};
  EXPECT_THAT(Reconcile(Want({"a"}), SetsOnly({{"a", evictable}})),
              ElementsAre(ReconcileAction{.kind = Kind::kPin, .fingerprint = "a"}));
}

TEST(Reconcile, NeitherTakesNorTouchesASetThatIsHeldOtherwise) {
  WantedState wanted = Want({"a"});
  wanted.sets[0].misplaced = true;
  wanted.aliases = {{"m@live", 0}};
  for (const bool quarantined : {false, true}) {
    const ActualSet held{.phase = Phase::kResident, .pinned = false, .quarantined = quarantined};
    const ActualState actual{.sets = {{"a", held}}, .aliases = {{"m@live", "a"}}};
    EXPECT_FALSE(IsSatisfied(wanted, actual)) << quarantined;
    EXPECT_THAT(Reconcile(wanted, actual), IsEmpty()) << quarantined;
  }
}

TEST(Reconcile, UnpinsASetThatIsHeldOtherwise) {
  WantedState wanted = Want({"a"});
  wanted.sets[0].misplaced = true;
  EXPECT_THAT(Reconcile(wanted, SetsOnly({{"a", kResident}})),
              ElementsAre(ReconcileAction{.kind = Kind::kUnpin, .fingerprint = "a"}));
  const ActualSet loading = {.phase = Phase::kLoading, .pinned = true};
  EXPECT_THAT(Reconcile(wanted, SetsOnly({{"a", loading}})),
              ElementsAre(ReconcileAction{.kind = Kind::kUnpin, .fingerprint = "a"}));
}

TEST(Reconcile, MovesAnAliasOnceItsSetIsResidentAndNotBefore) {
  WantedState wanted = Want({"new"});
  wanted.aliases = {{"m@live", 0}};
  ActualState actual = {.sets = {{"old", {.pinned = false}}}, .aliases = {{"m@live", "old"}}};
  EXPECT_THAT(Reconcile(wanted, actual), ElementsAre(Load(0, "new")));
  actual.sets["new"] = kResident;
  EXPECT_THAT(Reconcile(wanted, actual),
              ElementsAre(ReconcileAction{.kind = Kind::kAlias, .set = 0, .fingerprint = "new", .alias = "m@live"}));
  actual.aliases["m@live"] = "new";
  EXPECT_THAT(Reconcile(wanted, actual), IsEmpty());
}

TEST(Reconcile, UnpinsWhatIsNotWantedAnyMoreAndLeavesItResident) {
  const ActualState actual =
      SetsOnly({{"a", kResident}, {"b", kResident}, {"going", {.phase = Phase::kDraining, .pinned = true}}});
  EXPECT_THAT(Reconcile(Want({"a"}), actual), ElementsAre(ReconcileAction{.kind = Kind::kUnpin, .fingerprint = "b"}));
}

TEST(Reconcile, KeepsPinnedOnlyWhatASetOfUnknownFingerprintMayProveToBe) {
  const ActualState actual = SetsOnly({{"b", kResident}, {"c", kResident}});
  WantedState wanted = Want({""});
  wanted.sets[0].may_prove_to_be = {"b"};
  EXPECT_THAT(Reconcile(wanted, actual), ElementsAre(ReconcileAction{.kind = Kind::kUnpin, .fingerprint = "c"}));
}

TEST(Reconcile, ReleasesWhatIsInQuarantineOnceNobodyHoldsIt) {
  WantedState wanted = Want({"a"});
  wanted.aliases = {{"m@live", 0}};
  ActualState actual = {.sets = {{"a", {.pinned = true, .quarantined = true, .leases = 1}}},
                        .aliases = {{"m@live", "a"}}};
  EXPECT_THAT(Reconcile(wanted, actual), IsEmpty());
  actual.sets["a"].leases = 0;
  const ReconcileAction release = {.kind = Kind::kRelease, .set = 0, .fingerprint = "a"};
  EXPECT_THAT(Reconcile(wanted, actual), ElementsAre(release));
  actual.aliases["somebody@else"] = "a";
  EXPECT_THAT(Reconcile(wanted, actual), IsEmpty());
}

TEST(Reconcile, IsSatisfiedWhenEverySetIsWholeAndEveryAliasInPlace) {
  WantedState wanted = Want({"a"});
  wanted.aliases = {{"m@live", 0}};
  ActualState actual = {.sets = {{"a", kResident}}, .aliases = {{"m@live", "a"}}};
  EXPECT_TRUE(IsSatisfied(wanted, actual));
  EXPECT_TRUE(IsSatisfied({}, {}));
  actual.sets["a"].quarantined = true;
  EXPECT_FALSE(IsSatisfied(wanted, actual));
  actual.sets["a"] = {.phase = Phase::kLoading};
  EXPECT_FALSE(IsSatisfied(wanted, actual));
  actual = {.sets = {{"a", kResident}}, .aliases = {{"m@live", "b"}}};
  EXPECT_FALSE(IsSatisfied(wanted, actual));
  EXPECT_FALSE(IsSatisfied(Want({""}), {}));
}

// ---- Whatever happens to a node, it comes to what is wanted once nothing happens any more, and disturbs nobody on the
// way.

class RandomNode {
 public:
  explicit RandomNode(uint32_t seed) : random_(seed) {
    for (const char* const name : {"a", "b", "c"}) wanted_.sets.push_back({name});
    wanted_.aliases = {{"x@live", 0}, {"y@live", 2}};
  }

  // Something that an operator, an engine, a fault or time does.
  void Disturb() {
    const std::string name = Pick({"a", "b", "c", "d"});
    ActualSet& set = actual_.sets[name];
    switch (random_() % 7) {
      case 0:
        actual_.sets.erase(name);
        std::erase_if(actual_.aliases, [&](const auto& alias) { return alias.second == name; });
        return;
      case 1:
        set = {.phase = Phase::kLoading, .pinned = random_() % 2 == 0};
        std::erase_if(actual_.aliases, [&](const auto& alias) { return alias.second == name; });
        return;
      case 2:
        set.phase = Phase::kDraining;
        return;
      case 3:
        set.quarantined = set.phase == Phase::kResident;
        return;
      case 4:
        set.leases = set.phase == Phase::kResident ? static_cast<int>(random_() % 3) : 0;
        return;
      case 5:
        set.pinned = random_() % 2 == 0;
        return;
      default:
        if (set.phase == Phase::kResident) actual_.aliases[Pick({"x@live", "y@live", "z@mine"})] = name;
    }
  }

  // All that is under way ends, as it does where nothing fails.
  void LetTimePass() {
    for (auto& [name, set] : actual_.sets) {
      set.leases = 0;
      if (set.phase == Phase::kLoading) set.phase = Phase::kResident;
    }
    std::erase_if(actual_.sets, [](const auto& entry) { return entry.second.phase == Phase::kDraining; });
    std::erase_if(actual_.aliases, [&](const auto& alias) { return actual_.sets.count(alias.second) == 0; });
    actual_.aliases.erase("z@mine");
  }

  // False if an action is not one that may be done.
  bool Step() {
    int loads = 0;
    for (const ReconcileAction& action : Reconcile(wanted_, actual_)) {
      loads += action.kind == Kind::kLoad ? 1 : 0;
      if (!Do(action)) return false;
    }
    return loads <= 1;
  }

  bool satisfied() const { return IsSatisfied(wanted_, actual_); }
  const WantedState& wanted() const { return wanted_; }
  const ActualState& actual() const { return actual_; }

 private:
  std::string Pick(const std::vector<std::string>& words) { return words[random_() % words.size()]; }

  bool Do(const ReconcileAction& action) {
    const auto found = actual_.sets.find(action.fingerprint);
    if (action.kind == Kind::kLoad) {
      const bool is_busy = std::any_of(actual_.sets.begin(), actual_.sets.end(), [](const auto& entry) {
        return entry.first != "d" && entry.second.phase == Phase::kLoading;
      });
      if (found != actual_.sets.end() || is_busy) return false;
      actual_.sets[action.fingerprint] = {.phase = Phase::kLoading, .pinned = true};
      return true;
    }
    if (found == actual_.sets.end()) return false;
    switch (action.kind) {
      case Kind::kUnpin:
        found->second.pinned = false;
        return action.fingerprint == "d";
      case Kind::kPin:
        found->second.pinned = true;
        return action.fingerprint != "d";
      case Kind::kRelease:
        if (found->second.leases > 0 || !found->second.quarantined) return false;
        actual_.sets.erase(found);
        std::erase_if(actual_.aliases, [&](const auto& alias) { return alias.second == action.fingerprint; });
        return true;
      default:
        actual_.aliases[action.alias] = action.fingerprint;
        return found->second.phase == Phase::kResident && !found->second.quarantined;
    }
  }

  std::mt19937 random_;
  WantedState wanted_;
  ActualState actual_;
};

TEST(Reconcile, ComesToWhatIsWantedFromWhereverItIsAndDisturbsNobodyOnTheWay) {
  for (uint32_t seed = 1; seed <= 2000; ++seed) {
    SCOPED_TRACE(seed);
    RandomNode node(seed);
    for (int i = 0; i < 20; ++i) {
      node.Disturb();
      ASSERT_TRUE(node.Step());
    }
    for (int i = 0; i < 12 && !node.satisfied(); ++i) {
      node.LetTimePass();
      ASSERT_TRUE(node.Step());
    }
    ASSERT_TRUE(node.satisfied());
    node.LetTimePass();
    ASSERT_TRUE(node.Step());  // what is left are pins
    ASSERT_THAT(Reconcile(node.wanted(), node.actual()), IsEmpty());
  }
}

}  // namespace
}  // namespace weightbroker
