// How a set becomes resident and stops being so, which the vault has a part in: nothing is RESIDENT that the vault does
// not have, and nothing is released that it still has. It is never asked under the lock.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "server/broker/registry.h"
#include "server/broker/registry_internal.h"

namespace weightbroker {

using namespace registry_internal;  // NOLINT(google-build-using-namespace): the registry's own

namespace {

std::vector<int32_t> RanksOf(const std::vector<std::shared_ptr<const Shard>>& shards) {
  std::vector<int32_t> ranks;
  for (const auto& shard : shards) ranks.push_back(shard->rank);
  return ranks;
}

}  // namespace

absl::Status Registry::MakeResident(const WeightSetRef& set, std::vector<std::shared_ptr<const Shard>> shards,
                                    int64_t read_bytes) {
  ASSIGN_OR_RETURN(const Residency residency, PrepareResidency(set, shards, read_bytes));
  const std::vector<int32_t> ranks = RanksOf(shards);
  absl::Status status = KeepShards(*set, residency, shards);
  if (status.ok()) status = CommitResidency(set, residency, std::move(shards));
  if (!status.ok()) {
    // What is not known to be kept is forgotten, too. If that fails the vault has gone, and so will this broker.
    ForgetShards(*set, ranks).IgnoreError();
    return status;
  }
  // Somebody may have pinned it while it was written down. If that is lost it is resident all the same.
  KeepPins(set).IgnoreError();
  ForgetOldGenerations();
  return absl::OkStatus();
}

absl::StatusOr<Residency> Registry::PrepareResidency(const WeightSetRef& set, const ShardList& shards,
                                                     int64_t read_bytes) {
  Callbacks callbacks;
  Residency residency;
  {
    MutexLock lock(mutex_);
    RETURN_IF_ERROR(CheckNotEnded(*set));
    if (set->state_ == v1::WEIGHT_SET_STATE_LOADING) Move(*set, v1::WEIGHT_SET_STATE_VERIFYING, &callbacks);
    if (!CanMove(set->state_, v1::WEIGHT_SET_STATE_RESIDENT)) {
      return IllegalMove(*set, set->state_, v1::WEIGHT_SET_STATE_RESIDENT);
    }
    RETURN_IF_ERROR(CheckShards(*set, shards));
    residency = set->residency_;
    residency.generation = LastGeneration(set->fingerprint().hash) + 1;
    residency.resident_time = options_.clock->WallNow();
    residency.load_seconds = std::chrono::duration<double>(options_.clock->SteadyNow() - set->register_steady_).count();
    residency.read_bytes = read_bytes;
  }
  Call(callbacks);
  return residency;
}

absl::Status Registry::CheckShards(const WeightSetEntry& set, const ShardList& shards) {
  const std::vector<RankPlacement>& wanted = set.placement().ranks;
  if (!std::equal(shards.begin(), shards.end(), wanted.begin(), wanted.end(), [](const auto& shard, const auto& rank) {
        return shard->rank == rank.rank && shard->device == rank.device;
      })) {
    return MakeError(Reason::kProtocolError,
                     absl::StrCat("the loader handed over ", shards.size(), " shards, which are not those of ranks ",
                                  JoinRanks(wanted), " on their devices"));
  }
  std::map<std::string, int64_t> left_bytes = set.reserved_;
  for (const auto& shard : shards) {
    // A slab is rounded up to its pages, whose size only its maker knows beforehand.
    const int64_t slack_bytes = static_cast<int64_t>(shard->slabs.size()) * kHugePageBytes;
    int64_t& left = left_bytes[shard->device];
    left += slack_bytes - shard->size_bytes;
    if (left >= 0) continue;  // looked at each time, so that no sum overflows
    const auto granted = set.reserved_.find(shard->device);
    return MakeError(Reason::kProtocolError,
                     absl::StrCat("the loader was granted ", granted == set.reserved_.end() ? 0 : granted->second,
                                  " bytes on ", shard->device, " and handed over ", -left, " more than that"));
  }
  return absl::OkStatus();
}

absl::Status Registry::CheckNotEnded(const WeightSetEntry& set) const {
  if (!HasEnded(set.state_)) return absl::OkStatus();
  return MakeError(Reason::kCancelled,
                   absl::StrCat("weight set ", set.fingerprint().hash, " ended while it was loaded"));
}

absl::Status Registry::KeepShards(WeightSetEntry& set, const Residency& residency, const ShardList& shards) {
  NewWeightSet kept = set.request_;
  {
    MutexLock lock(mutex_);
    kept.pins = set.kept_pins_ = set.pins_;
  }
  // First, so that a generation that an engine has seen is never given out again, whatever becomes of the shards.
  RETURN_IF_ERROR(options_.vault->KeepGeneration(set.fingerprint().hash, residency.generation));
  for (const auto& shard : shards) {
    RETURN_IF_ERROR(options_.vault->Keep({kept, residency, *shard, static_cast<int32_t>(shards.size())}));
  }
  return absl::OkStatus();
}

absl::Status Registry::ForgetShards(const WeightSetEntry& set, const std::vector<int32_t>& ranks) {
  absl::Status first_failure;
  for (const int32_t rank : ranks) first_failure.Update(options_.vault->Forget(set.fingerprint().hash, rank));
  return first_failure;
}

absl::Status Registry::CommitResidency(const WeightSetRef& set, const Residency& residency, ShardList shards) {
  Callbacks callbacks;
  {
    MutexLock lock(mutex_);
    RETURN_IF_ERROR(CheckNotEnded(*set));
    Move(*set, v1::WEIGHT_SET_STATE_RESIDENT, &callbacks);
    PlaceShards(*set, residency, std::move(shards));
    // A load that ended while the service drains is let go at once: nobody may take a lease on it any more. The vault
    // keeps it for the next broker.
    if (draining_) {
      Move(*set, v1::WEIGHT_SET_STATE_DRAINING, &callbacks);
      FinishRelease(set, &callbacks);
    }
  }
  Call(callbacks);
  return absl::OkStatus();
}

void Registry::PlaceShards(WeightSetEntry& set, const Residency& residency, ShardList shards) {
  std::map<std::string, int64_t> bytes;
  for (const auto& shard : shards) bytes[shard->device] += shard->size_bytes;
  Reserve(set, std::move(bytes));
  set.lease_counts_.assign(shards.size(), 0);
  set.quarantines_.assign(shards.size(), "");
  set.shards_ = std::move(shards);
  set.done_bytes_ = set.read_bytes_;
  set.residency_ = residency;
  NoteUse(set);
  NoteGeneration(set.fingerprint().hash, residency.generation);
}

absl::StatusOr<WeightSetRef> Registry::Adopt(Adoption::Set adopted) {
  Callbacks callbacks;
  const auto set = std::make_shared<WeightSetEntry>(std::move(adopted.request));
  {
    MutexLock lock(mutex_);
    const std::string& hash = set->fingerprint().hash;
    if (std::any_of(sets_.begin(), sets_.end(),
                    [&](const WeightSetRef& other) { return other->fingerprint().hash == hash; })) {
      return MakeError(Reason::kProtocolError, absl::StrCat("there is a weight set ", hash, " already"),
                       {{"fingerprint", hash}});
    }
    set->state_ = v1::WEIGHT_SET_STATE_RESIDENT;
    set->kept_pins_ = set->pins_;
    set->read_bytes_ = adopted.residency.read_bytes;
    set->adopt_time_ = options_.clock->WallNow();
    PlaceShards(*set, adopted.residency, std::move(adopted.shards));
    for (size_t i = 0; i < set->shards_.size(); ++i) {
      const auto why = adopted.quarantines.find(set->shards_[i]->rank);
      if (why != adopted.quarantines.end()) set->quarantines_[i] = why->second;
    }
    sets_.push_back(set);
    CollectObservers(*set, &callbacks);
  }
  Call(callbacks);
  return set;
}

// ---- Generations.

void Registry::AdoptGenerations(const std::map<std::string, int64_t>& generations) {
  {
    MutexLock lock(mutex_);
    for (const auto& [fingerprint, generation] : generations) NoteGeneration(fingerprint, generation);
  }
  ForgetOldGenerations();
}

int64_t Registry::LastGeneration(const std::string& fingerprint) const {
  const auto last = generations_.find(fingerprint);
  return last == generations_.end() ? 0 : last->second.generation;
}

void Registry::NoteGeneration(const std::string& fingerprint, int64_t generation) {
  GenerationRecord& record = generations_[fingerprint];
  record.generation = std::max(record.generation, generation);
  record.last_use = ++use_count_;
}

void Registry::ForgetOldGenerations() {
  std::vector<std::string> forgotten;
  {
    MutexLock lock(mutex_);
    std::vector<std::pair<int64_t, std::string>> without_set;  // by last use
    for (const auto& [fingerprint, record] : generations_) {
      const auto is_same = [&name = fingerprint](const WeightSetRef& set) { return set->fingerprint().hash == name; };
      if (std::none_of(sets_.begin(), sets_.end(), is_same)) without_set.emplace_back(record.last_use, fingerprint);
    }
    if (without_set.size() <= options_.max_generations) return;
    std::sort(without_set.begin(), without_set.end());
    without_set.resize(without_set.size() - options_.max_generations);
    for (const auto& [last_use, fingerprint] : without_set) {
      generations_.erase(fingerprint);
      forgotten.push_back(fingerprint);
    }
  }
  // One that stays behind costs the vault a line, and counts again after the next start.
  for (const std::string& fingerprint : forgotten) options_.vault->ForgetGeneration(fingerprint).IgnoreError();
}

// ---- Release.

absl::StatusOr<Registry::Released> Registry::Release(const WeightSetRef& set) {
  return ReleaseWith(LeasePolicy::kRefuse, set);
}

absl::StatusOr<Registry::Released> Registry::ReleaseByForce(const WeightSetRef& set) {
  return ReleaseWith(LeasePolicy::kEnd, set);
}

absl::StatusOr<Registry::Released> Registry::ReleaseWith(LeasePolicy policy, const WeightSetRef& set) {
  Callbacks callbacks;
  Released released;
  std::vector<std::string> aliases;
  {
    MutexLock lock(mutex_);
    // One release at a time has the vault forget. Once a set is gone another of the same fingerprint may be resident,
    // and what the vault has then is that one's.
    while (set->vault_is_busy_) vault_done_.Wait(mutex_);
    if (policy == LeasePolicy::kRefuse) RETURN_IF_ERROR(CheckNotLeased(*set));
    if (policy == LeasePolicy::kRefuse) RETURN_IF_ERROR(CheckNotAliased(*set));
    if (IsLoading(set->state_)) {
      const bool by_force = policy == LeasePolicy::kEnd;
      return StillLoadingError(*set, ViewLocked(*set),
                               by_force ? "its load could not be ended just now: try again"
                                        : "wait until it is resident, or use force, which ends the load");
    }
    aliases = DropAliasesOf(*set);
    if (set->state_ == v1::WEIGHT_SET_STATE_RESIDENT) Move(*set, v1::WEIGHT_SET_STATE_DRAINING, &callbacks);
    released.set = DescribeLocked(*set);
    if (set->state_ != v1::WEIGHT_SET_STATE_DRAINING) {  // failed, or released meanwhile by somebody else
      Forget(set);
      return released;
    }
    released.ended_leases =
        EndLeases(set, "the weight set was unregistered by force; what is mapped stays valid", &callbacks);
    set->vault_is_busy_ = true;
  }
  Call(callbacks);
  ForgetAliases(aliases);
  RETURN_IF_ERROR(FinishForgetting(set));
  released.set.set_state(v1::WEIGHT_SET_STATE_RELEASED);
  return released;
}

// For whoever has set vault_is_busy_ of a set in DRAINING: has the vault forget it, and releases it unless leases are
// left, of which the last does.
absl::Status Registry::FinishForgetting(const WeightSetRef& set) {
  Callbacks callbacks;
  std::vector<int32_t> ranks;
  {
    MutexLock lock(mutex_);
    ranks = RanksOf(set->shards_);
  }
  const absl::Status forgotten = ForgetShards(*set, ranks);
  {
    MutexLock lock(mutex_);
    set->vault_is_busy_ = false;
    set->vault_has_forgotten_ = forgotten.ok();
    vault_done_.NotifyAll();
    // A service that drains may have released it meanwhile.
    const bool is_there = set->state_ == v1::WEIGHT_SET_STATE_DRAINING;
    if (forgotten.ok() && is_there && CountLeases(*set) == 0) FinishRelease(set, &callbacks);
  }
  Call(callbacks);
  return forgotten;
}

absl::Status Registry::Pin(const WeightSetRef& set, PinOwner owner) {
  while (true) {
    {
      MutexLock lock(mutex_);
      set->pins_.Of(owner) = true;  // first, so that it is not evicted meanwhile
    }
    RETURN_IF_ERROR(KeepPins(set));
    MutexLock lock(mutex_);
    if (set->pins_.Of(owner)) return absl::OkStatus();
    // Somebody else's has failed in between, and undone this one.
  }
}

absl::Status Registry::Unpin(const WeightSetRef& set, PinOwner owner) {
  while (true) {
    {
      MutexLock lock(mutex_);
      set->pins_.Of(owner) = false;
    }
    RETURN_IF_ERROR(KeepPins(set));
    MutexLock lock(mutex_);
    if (!set->pins_.Of(owner)) return absl::OkStatus();
    // As in Pin.
  }
}

// Has the vault know what is so, if it does not; what it cannot know is not so. Of a set that is not resident yet, it
// will.
absl::Status Registry::KeepPins(const WeightSetRef& set) {
  NewWeightSet kept = set->request_;
  Residency residency;
  ShardList shards;
  std::vector<std::string> quarantines;
  {
    MutexLock lock(mutex_);
    while (set->vault_is_busy_) vault_done_.Wait(mutex_);
    if (set->state_ != v1::WEIGHT_SET_STATE_RESIDENT || set->kept_pins_ == set->pins_) return absl::OkStatus();
    set->vault_is_busy_ = true;
    kept.pins = set->pins_;
    residency = set->residency_;
    shards = set->shards_;
    quarantines = set->quarantines_;
  }
  absl::Status status;
  const auto rank_count = static_cast<int32_t>(shards.size());
  for (size_t i = 0; i < shards.size(); ++i) {
    status.Update(options_.vault->Keep({kept, residency, *shards[i], rank_count, quarantines[i]}));
  }
  MutexLock lock(mutex_);
  set->vault_is_busy_ = false;
  if (status.ok()) {
    set->kept_pins_ = kept.pins;
  } else {
    set->pins_ = set->kept_pins_;
  }
  vault_done_.NotifyAll();
  return status;
}

absl::Status Registry::CheckNotLeased(const WeightSetEntry& set) const {
  const int leases = CountLeases(set);
  if (leases == 0) return absl::OkStatus();
  return MakeError(Reason::kLeased,
                   absl::StrCat("weight set ", set.fingerprint().hash, " has ", leases,
                                leases == 1 ? " lease: stop the engine that holds it, or use force"
                                            : " leases: stop the engines that hold them, or use force"),
                   {{"fingerprint", set.fingerprint().hash}, {"lease_count", absl::StrCat(leases)}});
}

}  // namespace weightbroker
