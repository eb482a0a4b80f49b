#include "server/broker/reconciler.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/base/thread.h"
#include "common/desired/desired_request.h"
#include "common/desired/desired_state.h"
#include "server/broker/timestamp.h"

namespace weightbroker {
namespace {

bool IsLoading(v1::WeightSetState state) {
  return state == v1::WEIGHT_SET_STATE_ALLOCATING || state == v1::WEIGHT_SET_STATE_LOADING ||
         state == v1::WEIGHT_SET_STATE_VERIFYING;
}

// Nothing of a set that has ended.
std::optional<ActualSet> LookAt(const v1::WeightSet& set) {
  if (set.state() == v1::WEIGHT_SET_STATE_FAILED || set.state() == v1::WEIGHT_SET_STATE_RELEASED) return std::nullopt;
  ActualSet actual;
  actual.phase = IsLoading(set.state())                         ? ActualSet::Phase::kLoading
                 : set.state() == v1::WEIGHT_SET_STATE_RESIDENT ? ActualSet::Phase::kResident
                                                                : ActualSet::Phase::kDraining;
  actual.pinned = set.pinned();
  for (const v1::Shard& shard : set.shards()) {
    actual.quarantined = actual.quarantined || !shard.quarantine().empty();
    actual.leases += shard.lease_count();
  }
  return actual;
}

void WriteFailure(const absl::Status& why, v1::Failure* failure) {
  failure->set_reason(GetErrorDetails(why).reason);
  failure->set_message(std::string(why.message()));
}

}  // namespace

Reconciler::Reconciler(ReconcilerOptions options) : options_(std::move(options)) {}

Reconciler::~Reconciler() {
  Stop();
  if (thread_.joinable()) thread_.join();
}

// ---- What is wanted.

absl::StatusOr<Reconciler::Desired> Reconciler::Parse() const {
  ASSIGN_OR_RETURN(const DesiredState state, ReadDesiredFile(*options_.files, options_.file));
  ASSIGN_OR_RETURN(std::vector<v1::RegisterRequest> requests, ToRegisterRequests(state, options_.file));
  if (options_.check) RETURN_IF_ERROR(options_.check(state));
  Desired desired;
  std::map<std::string, size_t> by_name;
  for (size_t i = 0; i < requests.size(); ++i) {
    by_name[state.sets[i].name] = i;
    Set& set = desired.sets.emplace_back();
    set.name = state.sets[i].name;
    set.request = std::move(requests[i]);
  }
  for (const auto& [alias, name] : state.aliases) desired.aliases[alias] = by_name.at(name);
  return desired;
}

absl::Status Reconciler::ReadFile() {
  if (options_.file.empty()) return absl::OkStatus();
  absl::StatusOr<Desired> desired = Parse();
  {
    MutexLock lock(mutex_);
    failure_ = desired.status();
    if (desired.ok()) {
      was_read_ = true;
      desired->version = desired_.version + 1;
      desired->dropped = desired_.dropped;
      for (const Set& before : desired_.sets) {
        if (!before.fingerprint.empty()) desired->dropped.insert(before.fingerprint);
        for (Set& set : desired->sets) {
          if (set.request.SerializeAsString() != before.request.SerializeAsString()) continue;
          set.fingerprint = before.fingerprint;
          set.load = before.load;
        }
      }
      desired_ = *desired;
    }
  }
  if (options_.on_read) options_.on_read(desired.ok());
  if (!desired.ok()) {
    Log(LogLevel::kError, "desired.refused",
        {{"file", options_.file}, {"message", std::string(desired.status().message())}});
    return desired.status();
  }
  Log(LogLevel::kInfo, "desired.read",
      {{"file", options_.file},
       {"sets", absl::StrCat(desired->sets.size())},
       {"aliases", absl::StrCat(desired->aliases.size())}});
  waker_->Wake();
  options_.registry->TellStateObservers();
  return absl::OkStatus();
}

// ---- The thread.

void Reconciler::Start() {
  if (options_.file.empty()) return;
  subscription_ = options_.registry->SubscribeToStates([waker = waker_] { waker->Wake(); });
  thread_ = StartThreadOrExit("the desired state", [this] { Run(); });
}

void Reconciler::Stop() {
  subscription_.Cancel();
  MutexLock lock(waker_->mutex);
  waker_->stopped = true;
  waker_->changed.NotifyAll();
}

void Reconciler::Waker::Wake() {
  MutexLock lock(mutex);
  woken = true;
  changed.NotifyAll();
}

bool Reconciler::stopped() const {
  MutexLock lock(waker_->mutex);
  return waker_->stopped;
}

void Reconciler::Run() {
  while (WaitForWork()) Pass();
}

bool Reconciler::WaitForWork() {
  const auto next_look = std::chrono::steady_clock::now() + options_.look_interval;
  MutexLock lock(waker_->mutex);
  while (!waker_->woken && !waker_->stopped && std::chrono::steady_clock::now() < next_look) {
    waker_->changed.WaitUntil(waker_->mutex, next_look);
  }
  waker_->woken = false;
  return !waker_->stopped;
}

void Reconciler::Pass() {
  Desired desired = Copy();
  for (Set& set : desired.sets) {
    if (stopped()) return;
    Settle(&set);
    if (MustFindFingerprint(set)) FindFingerprint(&set, &desired.dropped);
  }
  for (const ReconcileAction& action : Reconcile(Want(desired), Look(desired))) {
    if (stopped()) return;
    Perform(action, &desired);
  }
  desired.dropped = DroppedLeft(Want(desired), Look(desired));
  PutBack(desired);
  TellIfChanged();
}

// What has become of it since the last look.
void Reconciler::Settle(Set* set) {
  if (set->load != nullptr) {
    const WeightSetView view = options_.registry->View(set->load);
    if (IsLoading(view.state)) return;
    set->load = nullptr;
    if (view.state == v1::WEIGHT_SET_STATE_FAILED) return NoteFailure(set, view.failure);
  }
  if (set->failed_attempts == 0 || set->fingerprint_stale) return;
  const WeightSetRef found = options_.registry->Find(set->fingerprint);
  const bool is_resident = found != nullptr && options_.registry->View(found).state == v1::WEIGHT_SET_STATE_RESIDENT;
  if (!is_resident || !options_.registry->CheckNotQuarantined(found).ok()) return;
  set->failed_attempts = 0;
  set->failure = absl::OkStatus();
}

// What is not there is looked for anew each time: its files may be others by now.
bool Reconciler::MustFindFingerprint(const Set& set) const {
  if (set.load != nullptr || set.retry_at > options_.clock->SteadyNow()) return false;
  if (set.fingerprint.empty() || set.fingerprint_stale) return true;
  const WeightSetRef found = options_.registry->Find(set.fingerprint);
  return found == nullptr || options_.registry->View(found).state == v1::WEIGHT_SET_STATE_FAILED;
}

void Reconciler::FindFingerprint(Set* set, std::set<std::string>* dropped) {
  const absl::StatusOr<std::string> found = options_.find_fingerprint(set->request);
  if (!found.ok()) return NoteFailure(set, found.status());
  if (!set->fingerprint.empty() && set->fingerprint != *found) dropped->insert(set->fingerprint);
  if (set->fingerprint_stale) set->failed_attempts = 0;
  set->fingerprint = *found;
  set->fingerprint_stale = false;
}

void Reconciler::NoteFailure(Set* set, const absl::Status& why) {
  if (HasReason(why, Reason::kDraining)) return;  // the service is shutting down
  constexpr int kMostDoublings = 20;
  const auto pause = options_.min_pause * (int64_t{1} << std::min(set->failed_attempts, kMostDoublings));
  const auto capped = std::min<std::chrono::milliseconds>(pause, options_.max_pause);
  ++set->failed_attempts;
  set->failure = why;
  set->retry_at = options_.clock->SteadyNow() + capped;
  const std::string reason = GetErrorDetails(why).reason;
  Log(LogLevel::kError, "desired.failed",
      {{"set", set->name},
       {"model", Printable(set->request.spec().model())},
       {"reason", reason},
       {"message", std::string(why.message())},
       {"attempt", absl::StrCat(set->failed_attempts)},
       {"retry_ms", absl::StrCat(capped.count())}});
  if (options_.on_failure) options_.on_failure(reason);
}

// Unless it was read anew meanwhile: then what was found out is found again, but for what is not wanted any more.
void Reconciler::PutBack(const Desired& desired) {
  MutexLock lock(mutex_);
  if (desired_.version == desired.version) {
    desired_ = desired;
    return;
  }
  for (const Set& set : desired.sets) {
    if (!set.fingerprint.empty()) desired_.dropped.insert(set.fingerprint);
  }
}

void Reconciler::TellIfChanged() {
  const bool is_satisfied = IsSatisfied();
  if (is_satisfied == was_satisfied_) return;
  was_satisfied_ = is_satisfied;
  if (is_satisfied) {
    Log(LogLevel::kInfo, "desired.reached", {{"file", options_.file}});
  } else {
    Log(LogLevel::kWarning, "desired.lost",
        {{"file", options_.file}, {"message", "not all that is to be resident is so any more"}});
  }
  options_.registry->TellStateObservers();
}

// ---- Looking and acting.

WantedState Reconciler::Want(const Desired& desired) const {
  const TimePoint now = options_.clock->SteadyNow();
  WantedState wanted;
  for (const Set& set : desired.sets) wanted.sets.push_back({set.fingerprint, set.retry_at <= now});
  wanted.aliases = desired.aliases;
  wanted.dropped = desired.dropped;
  return wanted;
}

ActualState Reconciler::Look(const Desired& desired) const {
  ActualState actual;
  const auto look = [&](const std::string& fingerprint) {
    const WeightSetRef found = fingerprint.empty() ? nullptr : options_.registry->Find(fingerprint);
    if (found == nullptr) return;
    if (const auto set = LookAt(options_.registry->Describe(found)); set.has_value()) actual.sets[fingerprint] = *set;
  };
  for (const Set& set : desired.sets) look(set.fingerprint);
  for (const std::string& fingerprint : desired.dropped) look(fingerprint);
  for (const KeptAlias& alias : options_.registry->Aliases()) actual.aliases[alias.name] = alias.fingerprint;
  return actual;
}

void Reconciler::Perform(const ReconcileAction& action, Desired* desired) {
  absl::Status done;
  switch (action.kind) {
    case ReconcileAction::Kind::kLoad:
      done = Load(&desired->sets[action.set]);
      if (!done.ok()) NoteFailure(&desired->sets[action.set], done);
      return;
    case ReconcileAction::Kind::kRelease:
      done = ReleaseForReload(action, *desired);
      if (!done.ok()) NoteFailure(&desired->sets[action.set], done);
      return;
    case ReconcileAction::Kind::kAlias:
      done = PointAlias(action);
      break;
    case ReconcileAction::Kind::kPin:
    case ReconcileAction::Kind::kUnpin:
      done = ChangePin(action);
      break;
  }
  if (!done.ok()) NoteTrouble(action, done);
}

absl::Status Reconciler::Load(Set* set) {
  Log(LogLevel::kInfo, "desired.load", {{"set", set->name}, {"model", Printable(set->request.spec().model())}});
  ASSIGN_OR_RETURN(set->load, options_.load(set->request));
  set->fingerprint = set->load->fingerprint().hash;
  return absl::OkStatus();
}

// Its aliases would keep it. They name it again once it is resident.
absl::Status Reconciler::ReleaseForReload(const ReconcileAction& action, const Desired& desired) {
  const WeightSetRef set = options_.registry->Find(action.fingerprint);
  if (set == nullptr) return absl::OkStatus();
  const v1::WeightSet described = options_.registry->Describe(set);
  for (const std::string& alias : described.aliases()) {
    if (desired.aliases.count(alias) == 0) continue;
    RETURN_IF_ERROR(options_.registry->DeleteAlias(alias, action.fingerprint).status());
    if (options_.on_alias_change) options_.on_alias_change("deleted");
  }
  RETURN_IF_ERROR(options_.registry->Release(set).status());
  Log(LogLevel::kWarning, "desired.released",
      {{"set", desired.sets[action.set].name},
       {"fingerprint", action.fingerprint},
       {"message", "it was in quarantine and nobody held it: it is loaded again"}});
  return absl::OkStatus();
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
  if (action.kind == ReconcileAction::Kind::kPin) return options_.registry->Pin(set);
  RETURN_IF_ERROR(options_.registry->Unpin(set));
  Log(LogLevel::kInfo, "desired.dropped",
      {{"fingerprint", action.fingerprint},
       {"message", "it is not in the file any more: unpinned, and left resident"}});
  return absl::OkStatus();
}

// It is tried again at each look.
void Reconciler::NoteTrouble(const ReconcileAction& action, const absl::Status& why) {
  const std::string trouble = absl::StrCat(action.alias, " ", action.fingerprint, " ", why.message());
  if (trouble == std::exchange(last_trouble_, trouble)) return;
  Log(LogLevel::kError, "desired.not_done",
      {{"fingerprint", action.fingerprint},
       {"alias", action.alias},
       {"reason", GetErrorDetails(why).reason},
       {"message", std::string(why.message())}});
}

// ---- Describing.

Reconciler::Desired Reconciler::Copy() const {
  MutexLock lock(mutex_);
  return desired_;
}

absl::Status Reconciler::failure() const {
  MutexLock lock(mutex_);
  return failure_;
}

bool Reconciler::IsSatisfied() const {
  if (options_.file.empty()) return true;
  {
    MutexLock lock(mutex_);
    if (!was_read_) return false;
  }
  const Desired desired = Copy();
  return weightbroker::IsSatisfied(Want(desired), Look(desired));
}

std::vector<v1::DesiredSet> Reconciler::DescribeSets() const {
  std::vector<v1::DesiredSet> described;
  for (const Set& set : Copy().sets) described.push_back(Describe(set));
  return described;
}

v1::DesiredSet Reconciler::Describe(const Set& set) const {
  v1::DesiredSet proto;
  proto.set_name(set.name);
  proto.set_model(set.request.spec().model());
  proto.set_fingerprint(set.fingerprint);
  proto.set_failed_attempts(set.failed_attempts);
  if (!set.failure.ok()) WriteFailure(set.failure, proto.mutable_failure());
  DescribeState(set, &proto);
  if (proto.state() == v1::DesiredSet::STATE_FAILED) {
    const auto left = std::max(set.retry_at - options_.clock->SteadyNow(), TimePoint::duration::zero());
    SetTimestamp(options_.clock->WallNow() + std::chrono::duration_cast<std::chrono::system_clock::duration>(left),
                 proto.mutable_retry_time());
  }
  return proto;
}

void Reconciler::DescribeState(const Set& set, v1::DesiredSet* proto) const {
  const WeightSetRef found = set.fingerprint.empty() ? nullptr : options_.registry->Find(set.fingerprint);
  const v1::WeightSet there = found == nullptr ? v1::WeightSet() : options_.registry->Describe(found);
  const std::optional<ActualSet> actual = found == nullptr ? std::nullopt : LookAt(there);
  if (!actual.has_value()) {
    proto->set_state(set.failed_attempts > 0 ? v1::DesiredSet::STATE_FAILED : v1::DesiredSet::STATE_WAITING);
  } else if (actual->phase != ActualSet::Phase::kResident) {
    proto->set_state(v1::DesiredSet::STATE_LOADING);
    if (there.has_progress()) *proto->mutable_progress() = there.progress();
  } else {
    proto->set_state(actual->quarantined ? v1::DesiredSet::STATE_QUARANTINED : v1::DesiredSet::STATE_RESIDENT);
  }
}

std::vector<v1::DesiredAlias> Reconciler::DescribeAliases() const {
  const Desired desired = Copy();
  const ActualState actual = Look(desired);
  std::vector<v1::DesiredAlias> described;
  for (const auto& [name, index] : desired.aliases) {
    const Set& set = desired.sets[index];
    v1::DesiredAlias& alias = described.emplace_back();
    alias.set_name(name);
    alias.set_set(set.name);
    const auto now = actual.aliases.find(name);
    if (now != actual.aliases.end()) alias.set_fingerprint(now->second);
    alias.set_in_place(
        weightbroker::IsSatisfied({.sets = {{set.fingerprint}}, .aliases = {{name, 0}}, .dropped = {}}, actual));
  }
  return described;
}

}  // namespace weightbroker
