// Aliases: names that stand for one resident set at a time. The vault knows of each change before anybody sees it, so
// that what the next broker takes over is never older than what an engine was given.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/alias_name.h"
#include "common/base/error.h"
#include "common/base/near_names.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "server/broker/registry.h"
#include "server/broker/registry_internal.h"

namespace weightbroker {

using namespace registry_internal;  // NOLINT(google-build-using-namespace): the registry's own

namespace {

constexpr size_t kMostNearNames = 3;

std::string OrNone(const std::string& fingerprint) { return fingerprint.empty() ? "none" : fingerprint; }

}  // namespace

std::vector<std::string> Registry::AliasesOf(const WeightSetEntry& set) const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : aliases_) {
    if (entry.set.get() == &set) names.push_back(name);
  }
  return names;
}

absl::Status Registry::CheckNotAliased(const WeightSetEntry& set) const {
  const std::string names = absl::StrJoin(AliasesOf(set), ", ");
  if (names.empty()) return absl::OkStatus();
  return MakeError(Reason::kAliased,
                   absl::StrCat("weight set ", set.fingerprint().hash, " is named by ", names,
                                ": have that name another set, or delete it, or use force"),
                   {{"fingerprint", set.fingerprint().hash}, {"aliases", names}});
}

std::vector<std::string> Registry::AliasNames() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : aliases_) names.push_back(name);
  return names;
}

// Compares with every name, which takes a while: FindByAlias does it without the lock.
absl::Status Registry::AliasUnknown(const std::string& name, std::vector<std::string> known) {
  const std::string near = absl::StrJoin(NearNames(name, std::move(known), kMostNearNames), ", ");
  return MakeError(Reason::kAliasUnknown,
                   absl::StrCat("there is no alias ", Quote(name), "; ",
                                near.empty() ? "there are none at all" : absl::StrCat("the nearest are: ", near),
                                ": set it with weightbroker alias set"),
                   {{"alias", name}, {"nearest", near}});
}

absl::StatusOr<WeightSetRef> Registry::FindByAlias(const std::string& name) const {
  RETURN_IF_ERROR(CheckAliasName(name));
  std::vector<std::string> known;
  {
    MutexLock lock(mutex_);
    if (draining_) return DrainingError();
    const auto found = aliases_.find(name);
    if (found != aliases_.end()) return found->second.set;
    known = AliasNames();
  }
  return AliasUnknown(name, std::move(known));
}

std::vector<KeptAlias> Registry::Aliases() const {
  MutexLock lock(mutex_);
  std::vector<KeptAlias> aliases;
  for (const auto& [name, entry] : aliases_) {
    aliases.push_back({name, entry.set->fingerprint().hash, entry.previous_fingerprint, entry.move_time});
  }
  return aliases;
}

// ---- Changes.

absl::Status Registry::CheckExpected(const std::string& name, const std::optional<std::string>& expected) const {
  if (!expected.has_value()) return absl::OkStatus();
  const auto found = aliases_.find(name);
  const std::string now = found == aliases_.end() ? "" : found->second.set->fingerprint().hash;
  if (now == *expected) return absl::OkStatus();
  return MakeError(Reason::kAliasConflict,
                   absl::StrCat("alias ", name, " names ", OrNone(now), " and not ", OrNone(Printable(*expected)),
                                ", as was expected: somebody else has moved it; look again before you do"),
                   {{"alias", name}, {"found", now}, {"expected", Printable(*expected)}});
}

// The alias as it is to be.
absl::StatusOr<KeptAlias> Registry::PrepareAlias(const AliasChange& change) const {
  if (draining_) return DrainingError();
  if (change.set->state_ != v1::WEIGHT_SET_STATE_RESIDENT)
    return NotResidentError(*change.set, ViewLocked(*change.set));
  for (size_t i = 0; i < change.set->quarantines_.size(); ++i) {
    const std::string& why = change.set->quarantines_[i];
    if (!why.empty()) return QuarantinedError(*change.set, change.set->shards_[i]->rank, why);
  }
  KeptAlias alias{change.name, change.set->fingerprint().hash, "", options_.clock->WallNow()};
  const auto found = aliases_.find(change.name);
  // What is so already is left so, whatever is expected: a call may be made again whose answer was lost.
  const bool is_so = found != aliases_.end() && found->second.set == change.set;
  if (!is_so) RETURN_IF_ERROR(CheckExpected(change.name, change.expected_fingerprint));
  if (found == aliases_.end()) {
    if (aliases_.size() < options_.max_aliases) return alias;
    return MakeError(Reason::kTooManyRequests,
                     absl::StrCat("there are ", aliases_.size(), " aliases, the most that there may be: delete some"),
                     {{"limit", absl::StrCat(options_.max_aliases)}});
  }
  const AliasEntry& now = found->second;
  if (is_so) {
    alias.previous_fingerprint = now.previous_fingerprint;
    alias.move_time = now.move_time;
    return alias;
  }
  alias.previous_fingerprint = now.set->fingerprint().hash;
  if (change.release_previous && AliasesOf(*now.set).size() > 1) return CheckNotAliased(*now.set);
  return alias;
}

// Gives the set that it named before, if any.
WeightSetRef Registry::CommitAlias(const KeptAlias& alias, const WeightSetRef& set) {
  AliasEntry& entry = aliases_[alias.name];
  entry.previous_fingerprint = alias.previous_fingerprint;
  entry.move_time = alias.move_time;
  return std::exchange(entry.set, set);
}

int Registry::TellSuperseded(const std::string& alias, const WeightSetRef& set, Callbacks* callbacks) {
  int told = 0;
  for (const auto& [id, record] : leases_) {
    if (record.alias != alias || record.set == set || !record.on_superseded) continue;
    ++told;
    callbacks->emplace_back([on_superseded = record.on_superseded, alias, fingerprint = set->fingerprint().hash] {
      on_superseded(alias, fingerprint);
    });
  }
  return told;
}

absl::StatusOr<AliasChanged> Registry::SetAlias(const AliasChange& change) {
  RETURN_IF_ERROR(CheckAliasName(change.name));
  AliasChanged changed;
  WeightSetRef previous;
  {
    MutexLock alias_lock(alias_mutex_);
    {
      MutexLock lock(mutex_);
      ASSIGN_OR_RETURN(changed.alias, PrepareAlias(change));
    }
    RETURN_IF_ERROR(options_.vault->KeepAlias(changed.alias));
    Callbacks callbacks;
    absl::Status committed;
    {
      MutexLock lock(mutex_);
      if (change.set->state_ != v1::WEIGHT_SET_STATE_RESIDENT) {  // it was released meanwhile
        committed = NotResidentError(*change.set, ViewLocked(*change.set));
      } else {
        previous = CommitAlias(changed.alias, change.set);
        if (previous != change.set) changed.superseded_leases = TellSuperseded(change.name, change.set, &callbacks);
      }
    }
    if (!committed.ok()) {
      UndoKeptAlias(change.name);
      return committed;
    }
    Call(callbacks);
  }
  if (!change.release_previous) return changed;
  // Where it names this set already, the one before that may still be there.
  if (previous == nullptr || previous == change.set) previous = Find(changed.alias.previous_fingerprint);
  if (previous != nullptr && previous != change.set) {
    ASSIGN_OR_RETURN(changed.released, ReleaseOnceUnleased(previous));
  }
  return changed;
}

// What the vault was told has not come true.
void Registry::UndoKeptAlias(const std::string& name) {
  std::optional<KeptAlias> was;
  {
    MutexLock lock(mutex_);
    const auto found = aliases_.find(name);
    if (found != aliases_.end()) {
      const AliasEntry& entry = found->second;
      was = {name, entry.set->fingerprint().hash, entry.previous_fingerprint, entry.move_time};
    }
  }
  // A vault that fails has gone, and so will this broker.
  (was.has_value() ? options_.vault->KeepAlias(*was) : options_.vault->ForgetAlias(name)).IgnoreError();
}

// Lets nobody in any more; the vault forgets it at once, so that no later broker takes it up again.
// Nothing if it is neither resident nor on its way out.
absl::StatusOr<std::optional<v1::WeightSet>> Registry::ReleaseOnceUnleased(const WeightSetRef& set) {
  Callbacks callbacks;
  v1::WeightSet released;
  {
    MutexLock lock(mutex_);
    while (set->vault_is_busy_) vault_done_.Wait(mutex_);
    RETURN_IF_ERROR(CheckNotAliased(*set));
    if (set->state_ == v1::WEIGHT_SET_STATE_RESIDENT) Move(*set, v1::WEIGHT_SET_STATE_DRAINING, &callbacks);
    if (set->state_ != v1::WEIGHT_SET_STATE_DRAINING) return std::nullopt;
    released = DescribeLocked(*set);
    set->vault_is_busy_ = true;
  }
  Call(callbacks);
  RETURN_IF_ERROR(FinishForgetting(set));
  released.set_state(View(set).state);
  return released;
}

absl::StatusOr<KeptAlias> Registry::DeleteAlias(const std::string& name,
                                                const std::optional<std::string>& expected_fingerprint) {
  MutexLock alias_lock(alias_mutex_);
  RETURN_IF_ERROR(FindByAlias(name).status());
  KeptAlias deleted;
  {
    MutexLock lock(mutex_);
    const auto found = aliases_.find(name);
    if (found == aliases_.end()) return AliasUnknown(name, AliasNames());  // its set was released just now
    RETURN_IF_ERROR(CheckExpected(name, expected_fingerprint));
    const AliasEntry& entry = found->second;
    deleted = {name, entry.set->fingerprint().hash, entry.previous_fingerprint, entry.move_time};
  }
  RETURN_IF_ERROR(options_.vault->ForgetAlias(name));
  MutexLock lock(mutex_);
  aliases_.erase(name);
  return deleted;
}

std::vector<std::string> Registry::DropAliasesOf(const WeightSetEntry& set) {
  std::vector<std::string> names = AliasesOf(set);
  for (const std::string& name : names) aliases_.erase(name);
  return names;
}

void Registry::ForgetAliases(const std::vector<std::string>& names) {
  if (names.empty()) return;
  MutexLock alias_lock(alias_mutex_);
  for (const std::string& name : names) {
    {
      MutexLock lock(mutex_);
      if (aliases_.count(name) > 0) continue;  // set anew meanwhile
    }
    // One that stays behind names a set that the next broker does not find.
    options_.vault->ForgetAlias(name).IgnoreError();
  }
}

absl::Status Registry::AdoptAlias(const KeptAlias& alias) {
  MutexLock lock(mutex_);
  const auto found = std::find_if(sets_.begin(), sets_.end(), [&](const WeightSetRef& set) {
    return set->fingerprint().hash == alias.fingerprint;
  });
  if (found == sets_.end()) {
    return MakeError(Reason::kNotResident,
                     absl::StrCat("alias ", alias.name, " named weight set ", alias.fingerprint,
                                  ", which has not been taken over: set it again"),
                     {{"alias", alias.name}, {"fingerprint", alias.fingerprint}});
  }
  if ((*found)->state_ != v1::WEIGHT_SET_STATE_RESIDENT) return NotResidentError(**found, ViewLocked(**found));
  CommitAlias(alias, *found);
  return absl::OkStatus();
}

// ---- Those who hold.

void Registry::Follow(const Lease& lease, const std::string& alias, Superseded on_superseded) {
  std::string now;  // the fingerprint, if it is another set's
  {
    MutexLock lock(mutex_);
    const auto record = leases_.find(lease.id());
    if (record == leases_.end()) return;  // ended by force
    record->second.alias = alias;
    record->second.on_superseded = on_superseded;
    const auto found = aliases_.find(alias);
    if (found != aliases_.end() && found->second.set != record->second.set) {
      now = found->second.set->fingerprint().hash;
    }
  }
  if (!now.empty()) on_superseded(alias, now);
}

}  // namespace weightbroker
