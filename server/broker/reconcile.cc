#include "server/broker/reconcile.h"

#include <algorithm>

namespace weightbroker {
namespace {

using Kind = ReconcileAction::Kind;
using Phase = ActualSet::Phase;

const ActualSet* Find(const ActualState& actual, const std::string& fingerprint) {
  const auto found = actual.sets.find(fingerprint);
  return found == actual.sets.end() ? nullptr : &found->second;
}

bool IsWhole(const WantedState::Set& wanted, const ActualState& actual) {
  const ActualSet* const set = Find(actual, wanted.fingerprint);
  return set != nullptr && set->phase == Phase::kResident && !set->quarantined && !wanted.misplaced;
}

bool IsWanted(const WantedState& wanted, const std::string& fingerprint) {
  return std::any_of(wanted.sets.begin(), wanted.sets.end(),
                     [&](const auto& set) { return set.fingerprint == fingerprint && !set.misplaced; });
}

bool MayProveToBeWanted(const WantedState& wanted, const std::string& fingerprint) {
  return std::any_of(wanted.sets.begin(), wanted.sets.end(),
                     [&](const auto& set) { return set.may_prove_to_be.count(fingerprint) > 0; });
}

void UnpinDropped(const WantedState& wanted, const ActualState& actual, std::vector<ReconcileAction>* actions) {
  for (const auto& [fingerprint, set] : actual.sets) {
    if (!set.pinned || set.phase == Phase::kDraining) continue;
    if (IsWanted(wanted, fingerprint) || MayProveToBeWanted(wanted, fingerprint)) continue;
    actions->push_back({.kind = Kind::kUnpin, .fingerprint = fingerprint});
  }
}

// An alias that nobody wants here is somebody's who will miss it.
bool HasStrangeAlias(const WantedState& wanted, const ActualState& actual, const std::string& fingerprint) {
  return std::any_of(actual.aliases.begin(), actual.aliases.end(), [&](const auto& alias) {
    return alias.second == fingerprint && wanted.aliases.count(alias.first) == 0;
  });
}

void ReleaseQuarantined(const WantedState& wanted, const ActualState& actual, std::vector<ReconcileAction>* actions) {
  for (size_t i = 0; i < wanted.sets.size(); ++i) {
    const std::string& fingerprint = wanted.sets[i].fingerprint;
    const ActualSet* const set = Find(actual, fingerprint);
    if (set == nullptr || set->phase != Phase::kResident || !set->quarantined || wanted.sets[i].misplaced) continue;
    if (set->leases > 0 || !wanted.sets[i].may_try || HasStrangeAlias(wanted, actual, fingerprint)) continue;
    actions->push_back({.kind = Kind::kRelease, .set = i, .fingerprint = fingerprint});
  }
}

void LoadNext(const WantedState& wanted, const ActualState& actual, std::vector<ReconcileAction>* actions) {
  for (const auto& wanted_set : wanted.sets) {
    const ActualSet* const set = Find(actual, wanted_set.fingerprint);
    if (set != nullptr && set->phase == Phase::kLoading) return;
  }
  for (size_t i = 0; i < wanted.sets.size(); ++i) {
    const WantedState::Set& set = wanted.sets[i];
    if (set.fingerprint.empty() || !set.may_try || Find(actual, set.fingerprint) != nullptr) continue;
    actions->push_back({.kind = Kind::kLoad, .set = i, .fingerprint = set.fingerprint});
    return;
  }
}

void PinWanted(const WantedState& wanted, const ActualState& actual, std::vector<ReconcileAction>* actions) {
  for (const auto& wanted_set : wanted.sets) {
    const ActualSet* const set = Find(actual, wanted_set.fingerprint);
    if (set == nullptr || set->phase == Phase::kDraining || set->pinned || wanted_set.misplaced) continue;
    const ReconcileAction pin = {.kind = Kind::kPin, .fingerprint = wanted_set.fingerprint};
    if (std::find(actions->begin(), actions->end(), pin) == actions->end()) actions->push_back(pin);
  }
}

bool IsInPlace(const std::string& alias, const std::string& fingerprint, const ActualState& actual) {
  const auto now = actual.aliases.find(alias);
  return now != actual.aliases.end() && now->second == fingerprint;
}

void MoveAliases(const WantedState& wanted, const ActualState& actual, std::vector<ReconcileAction>* actions) {
  for (const auto& [alias, index] : wanted.aliases) {
    const std::string& fingerprint = wanted.sets[index].fingerprint;
    if (!IsWhole(wanted.sets[index], actual) || IsInPlace(alias, fingerprint, actual)) continue;
    actions->push_back({.kind = Kind::kAlias, .set = index, .fingerprint = fingerprint, .alias = alias});
  }
}

}  // namespace

std::vector<ReconcileAction> Reconcile(const WantedState& wanted, const ActualState& actual) {
  std::vector<ReconcileAction> actions;
  MoveAliases(wanted, actual, &actions);
  PinWanted(wanted, actual, &actions);
  UnpinDropped(wanted, actual, &actions);
  ReleaseQuarantined(wanted, actual, &actions);
  LoadNext(wanted, actual, &actions);
  return actions;
}

bool IsSatisfied(const WantedState& wanted, const ActualState& actual) {
  const auto is_whole = [&](const auto& set) { return IsWhole(set, actual); };
  return std::all_of(wanted.sets.begin(), wanted.sets.end(), is_whole) &&
         std::all_of(wanted.aliases.begin(), wanted.aliases.end(), [&](const auto& alias) {
           return IsInPlace(alias.first, wanted.sets[alias.second].fingerprint, actual);
         });
}

}  // namespace weightbroker
