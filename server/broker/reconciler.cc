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

namespace weightbroker {

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
      TakeOver(desired_, &*desired);
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

// What is known of each entry that says the same as before, its pause after a failure included: a file that is read
// again for another set's sake is no reason to try this one sooner. Its model's files may have changed.
void Reconciler::TakeOver(const Desired& before, Desired* now) {
  std::map<std::string, const Set*> known;
  for (const Set& set : before.sets) known[set.request.SerializeAsString()] = &set;
  for (Set& set : now->sets) {
    const auto same = known.find(set.request.SerializeAsString());
    if (same == known.end()) continue;
    std::string name = std::move(set.name);
    set = *same->second;
    set.name = std::move(name);
    set.fingerprint_stale = true;
  }
}

// ---- The thread.

void Reconciler::Start() {
  if (options_.file.empty()) return UnpinAll();
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
  while (WaitForWork()) {
    Pass();
    if (options_.on_look) options_.on_look();
  }
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
  if (!was_read()) return;  // nobody knows what is wanted
  Desired desired = Copy();
  for (Set& set : desired.sets) {
    if (stopped()) return;
    Settle(&set);
    if (MustFindFingerprint(set)) FindFingerprint(&set);
  }
  for (Set& set : desired.sets) FindWhatItMayProveToBe(desired, &set);
  Troubles troubles;
  for (const ReconcileAction& action : Reconcile(Want(desired), Look(desired))) {
    if (stopped()) return;
    Perform(action, &desired, &troubles);
  }
  NoteTroubles(troubles);
  PutBack(desired);
  TellIfChanged();
}

// What has become of it since the last look.
void Reconciler::Settle(Set* set) {
  const absl::Status held = CheckHeld(*set);
  // A stale fingerprint is found anew first: what is held otherwise may be of files that are others by now.
  if (!held.ok() && !set->fingerprint_stale) return NoteMisplaced(set, held);
  if (held.ok() && set->was_misplaced) Forgive(set);
  const std::optional<ActualSet> actual = LookAt(set->fingerprint);
  if (set->load != nullptr) {
    if (actual.has_value() && actual->phase == ActualSet::Phase::kLoading) return;
    const WeightSetView view = options_.registry->View(std::exchange(set->load, nullptr));
    if (view.state == v1::WEIGHT_SET_STATE_FAILED) return NoteFailure(set, view.failure);
  }
  const bool is_whole = actual.has_value() && actual->phase == ActualSet::Phase::kResident && !actual->quarantined;
  if (!is_whole) {
    set->whole_since.reset();
    return;
  }
  if (set->failed_attempts == 0 || set->fingerprint_stale) return;
  const TimePoint now = options_.clock->SteadyNow();
  if (!set->whole_since.has_value()) set->whole_since = now;
  // Memory that is bad shows only some time after a load that went well.
  if (!set->was_damaged || now - *set->whole_since >= options_.trusted_after) Forgive(set);
}

// Somebody has registered it with other ranks. What there is may be in use, and is left to whoever did.
void Reconciler::NoteMisplaced(Set* set, const absl::Status& why) {
  set->load = nullptr;
  const bool is_new = !std::exchange(set->was_misplaced, true);
  if (is_new || set->retry_at <= options_.clock->SteadyNow()) NoteFailure(set, why);
}

void Reconciler::Forgive(Set* set) {
  set->failed_attempts = 0;
  set->failure.reset();
  set->retry_at = {};
  set->was_misplaced = false;
  set->was_damaged = false;
}

// What is not there is looked for anew each time: its files may be others by now.
bool Reconciler::MustFindFingerprint(const Set& set) const {
  if (set.load != nullptr || set.retry_at > options_.clock->SteadyNow()) return false;
  return set.fingerprint_stale || !LookAt(set.fingerprint).has_value();
}

void Reconciler::FindFingerprint(Set* set) {
  const absl::StatusOr<std::string> found = options_.find_fingerprint(set->request);
  if (!found.ok()) return NoteFailure(set, found.status());
  if (set->fingerprint != *found) Forgive(set);  // it is other files now, or there for the first time
  set->fingerprint = *found;
  set->fingerprint_stale = false;
}

// What has left the file and may be this one stays pinned until its fingerprint is known: it would be evicted, and
// loaded again.
void Reconciler::FindWhatItMayProveToBe(const Desired& desired, Set* set) const {
  if (!set->fingerprint.empty() && !set->fingerprint_stale) return set->may_prove_to_be.clear();
  std::set<std::string> found;
  for (const WeightSetRef& other : options_.registry->Sets()) {
    const std::string& fingerprint = other->fingerprint().hash;
    const bool is_wanted = std::any_of(desired.sets.begin(), desired.sets.end(),
                                       [&](const Set& wanted) { return wanted.fingerprint == fingerprint; });
    if (is_wanted || !options_.registry->View(other).pins.by_desired_state) continue;
    if (options_.may_prove_to_be(set->request, *other)) found.insert(fingerprint);
  }
  for (const std::string& fingerprint : found) {
    if (set->may_prove_to_be.count(fingerprint) > 0) continue;
    Log(LogLevel::kWarning, "desired.stays_pinned",
        {{"fingerprint", fingerprint},
         {"set", set->name},
         {"message",
          "it is not in the file any more, and is not unpinned before the fingerprint of this set is known, "
          "which was made from the same folder"}});
  }
  set->may_prove_to_be = std::move(found);
}

void Reconciler::NoteFailure(Set* set, const absl::Status& why) {
  if (HasReason(why, Reason::kDraining)) return;  // the service is shutting down
  constexpr int kMostDoublings = 20;
  const auto pause = options_.min_pause * (int64_t{1} << std::min(set->failed_attempts, kMostDoublings));
  const auto capped = std::min<std::chrono::milliseconds>(pause, options_.max_pause);
  ++set->failed_attempts;
  set->failure.emplace(why);
  set->retry_at = options_.clock->SteadyNow() + capped;
  Log(LogLevel::kError, "desired.failed",
      {{"set", set->name},
       {"model", Printable(set->request.spec().model())},
       {"reason", set->failure->reason},
       {"message", set->failure->message},
       {"attempt", absl::StrCat(set->failed_attempts)},
       {"retry_ms", absl::StrCat(capped.count())}});
  if (options_.on_failure) options_.on_failure(set->failure->reason);
}

void Reconciler::PutBack(const Desired& desired) {
  MutexLock lock(mutex_);
  if (desired_.version == desired.version) {
    desired_ = desired;
  } else {  // it was read anew meanwhile
    TakeOver(desired, &desired_);
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

}  // namespace weightbroker
