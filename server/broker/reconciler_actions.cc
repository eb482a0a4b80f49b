// What there is, what of it is to be changed, and how that is done.

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "server/broker/reconciler.h"

namespace weightbroker {
namespace {

bool IsLoading(v1::WeightSetState state) {
  return state == v1::WEIGHT_SET_STATE_ALLOCATING || state == v1::WEIGHT_SET_STATE_LOADING ||
         state == v1::WEIGHT_SET_STATE_VERIFYING;
}

absl::Status WasDamaged(const absl::Status& quarantine) {
  auto metadata = GetErrorDetails(quarantine).metadata;
  return MakeError(Reason::kQuarantined,
                   absl::StrCat("rank ", metadata["rank"], " was in quarantine (", metadata["cause"],
                                "), and is loaded again; where that goes on, look for bad memory"),
                   metadata);
}

}  // namespace

std::optional<ActualSet> Reconciler::LookAt(const std::string& fingerprint) const {
  const WeightSetRef found = fingerprint.empty() ? nullptr : options_.registry->Find(fingerprint);
  if (found == nullptr) return std::nullopt;
  const v1::WeightSet set = options_.registry->Describe(found);
  if (set.state() == v1::WEIGHT_SET_STATE_FAILED || set.state() == v1::WEIGHT_SET_STATE_RELEASED) return std::nullopt;
  ActualSet actual;
  actual.phase = IsLoading(set.state())                         ? ActualSet::Phase::kLoading
                 : set.state() == v1::WEIGHT_SET_STATE_RESIDENT ? ActualSet::Phase::kResident
                                                                : ActualSet::Phase::kDraining;
  actual.pinned = options_.registry->View(found).pins.by_desired_state;
  for (const v1::Shard& shard : set.shards()) {
    actual.quarantined = actual.quarantined || !shard.quarantine().empty();
    actual.leases += shard.lease_count();
  }
  return actual;
}

absl::Status Reconciler::CheckHeld(const Set& set) const {
  const WeightSetRef found = set.fingerprint.empty() ? nullptr : options_.registry->Find(set.fingerprint);
  if (found == nullptr) return absl::OkStatus();
  const v1::WeightSetState state = options_.registry->View(found).state;
  if (!IsLoading(state) && state != v1::WEIGHT_SET_STATE_RESIDENT) return absl::OkStatus();
  return weightbroker::CheckHeld(set.request, found->placement());
}

WantedState Reconciler::Want(const Desired& desired) const {
  const TimePoint now = options_.clock->SteadyNow();
  WantedState wanted;
  for (const Set& set : desired.sets) {
    wanted.sets.push_back({.fingerprint = set.fingerprint,
                           .may_try = set.retry_at <= now,
                           .misplaced = !CheckHeld(set).ok(),
                           .may_prove_to_be = set.may_prove_to_be});
  }
  wanted.aliases = desired.aliases;
  return wanted;
}

ActualState Reconciler::Look(const Desired& desired) const {
  ActualState actual;
  const auto look = [&](const std::string& fingerprint) {
    if (const auto set = LookAt(fingerprint); set.has_value()) actual.sets[fingerprint] = *set;
  };
  for (const Set& set : desired.sets) look(set.fingerprint);
  for (const WeightSetRef& set : options_.registry->Sets()) {
    if (options_.registry->View(set).pins.by_desired_state) look(set->fingerprint().hash);
  }
  for (const KeptAlias& alias : options_.registry->Aliases()) actual.aliases[alias.name] = alias.fingerprint;
  return actual;
}

void Reconciler::Perform(const ReconcileAction& action, Desired* desired, Troubles* troubles) {
  absl::Status done;
  switch (action.kind) {
    case ReconcileAction::Kind::kLoad:
      done = Load(&desired->sets[action.set]);
      if (!done.ok()) NoteFailure(&desired->sets[action.set], done);
      return;
    case ReconcileAction::Kind::kRelease:
      ReleaseForReload(action, desired);
      return;
    case ReconcileAction::Kind::kAlias:
      done = PointAlias(action);
      break;
    case ReconcileAction::Kind::kPin:
    case ReconcileAction::Kind::kUnpin:
      done = ChangePin(action);
      break;
  }
  if (!done.ok()) troubles->emplace(action.alias.empty() ? action.fingerprint : action.alias, done);
}

absl::Status Reconciler::Load(Set* set) {
  Log(LogLevel::kInfo, "desired.load", {{"set", set->name}, {"model", Printable(set->request.spec().model())}});
  ASSIGN_OR_RETURN(set->load, options_.load(set->request));
  set->fingerprint = set->load->fingerprint().hash;
  return absl::OkStatus();
}

// That it was damaged counts as a failure: memory that is bad would have it loaded and released in turns without end.
void Reconciler::ReleaseForReload(const ReconcileAction& action, Desired* desired) {
  Set* const wanted = &desired->sets[action.set];
  const WeightSetRef set = options_.registry->Find(action.fingerprint);
  if (set == nullptr) return;
  const absl::Status damage = options_.registry->CheckNotQuarantined(set);
  const absl::Status released = Release(set, *desired);
  if (!released.ok()) return NoteFailure(wanted, released);
  Log(LogLevel::kWarning, "desired.released",
      {{"set", wanted->name},
       {"fingerprint", action.fingerprint},
       {"message", "it was in quarantine and nobody held it: it is loaded again"}});
  wanted->was_damaged = true;
  NoteFailure(wanted, WasDamaged(damage));
}

// Its aliases would keep it. They name it again once it is resident.
absl::Status Reconciler::Release(const WeightSetRef& set, const Desired& desired) {
  const v1::WeightSet described = options_.registry->Describe(set);
  for (const std::string& alias : described.aliases()) {
    if (desired.aliases.count(alias) == 0) continue;
    RETURN_IF_ERROR(options_.registry->DeleteAlias(alias, set->fingerprint().hash).status());
    if (options_.on_alias_change) options_.on_alias_change("deleted");
  }
  return options_.registry->Release(set).status();
}

absl::Status Reconciler::PointAlias(const ReconcileAction& action) {
  AliasChange change{.name = action.alias, .set = options_.registry->Find(action.fingerprint)};
  if (change.set == nullptr) return absl::OkStatus();  // the next look sees it
  ASSIGN_OR_RETURN(const AliasChanged changed, options_.registry->SetAlias(change));
  if (options_.on_alias_change) options_.on_alias_change("set");
  Log(LogLevel::kInfo, "alias.set",
      {{"alias", changed.alias.name},
       {"fingerprint", changed.alias.fingerprint},
       {"previous", changed.alias.previous_fingerprint},
       {"superseded_leases", absl::StrCat(changed.superseded_leases)},
       {"cause", options_.file}});
  return absl::OkStatus();
}

absl::Status Reconciler::ChangePin(const ReconcileAction& action) {
  const WeightSetRef set = options_.registry->Find(action.fingerprint);
  if (set == nullptr) return absl::OkStatus();
  if (action.kind == ReconcileAction::Kind::kPin) return options_.registry->Pin(set, PinOwner::kDesiredState);
  RETURN_IF_ERROR(options_.registry->Unpin(set, PinOwner::kDesiredState));
  Log(LogLevel::kInfo, "desired.dropped",
      {{"fingerprint", action.fingerprint},
       {"message",
        "it is not in the file any more, or is held otherwise than the file says: it is pinned for the file no longer, "
        "and left resident"}});
  return absl::OkStatus();
}

// What an earlier broker pinned for a file that there is no more.
void Reconciler::UnpinAll() {
  Desired none;
  Troubles troubles;
  for (const ReconcileAction& action : Reconcile(Want(none), Look(none))) Perform(action, &none, &troubles);
  NoteTroubles(troubles);
}

// What was so at the last look, too, is not said again.
void Reconciler::NoteTroubles(const Troubles& troubles) {
  Troubles before;
  {
    MutexLock lock(mutex_);
    before = std::exchange(troubles_, troubles);
  }
  for (const auto& [subject, why] : troubles) {
    const auto known = before.find(subject);
    if (known != before.end() && known->second == why) continue;
    Log(LogLevel::kError, "desired.not_done", {{"subject", subject}, {"reason", why.reason}, {"message", why.message}});
  }
}

}  // namespace weightbroker
