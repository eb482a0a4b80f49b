#include "server/broker/registry.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "server/broker/registry_internal.h"

namespace weightbroker {
namespace registry_internal {

void Call(const std::vector<std::function<void()>>& callbacks) {
  for (const auto& callback : callbacks) callback();
}

bool HasEnded(v1::WeightSetState state) {
  return state == v1::WEIGHT_SET_STATE_FAILED || state == v1::WEIGHT_SET_STATE_RELEASED;
}

bool IsLoading(v1::WeightSetState state) {
  return state == v1::WEIGHT_SET_STATE_ALLOCATING || state == v1::WEIGHT_SET_STATE_LOADING ||
         state == v1::WEIGHT_SET_STATE_VERIFYING;
}

absl::Status IllegalMove(const WeightSetEntry& set, v1::WeightSetState from, v1::WeightSetState to) {
  return MakeError(
      Reason::kProtocolError,
      absl::StrCat("weight set ", set.fingerprint().hash, " cannot go from ", StateName(from), " to ", StateName(to)),
      {{"fingerprint", set.fingerprint().hash}, {"from", StateName(from)}, {"to", StateName(to)}});
}

absl::Status StillLoadingError(const WeightSetEntry& set, const WeightSetView& view, const std::string& advice) {
  return MakeError(
      Reason::kStillLoading,
      absl::StrCat("weight set ", set.fingerprint().hash, " is still being loaded: ", StateName(view.state), ", ",
                   view.done_bytes, " of ", view.total_bytes, " bytes; ", advice),
      {{"fingerprint", set.fingerprint().hash},
       {"state", StateName(view.state)},
       {"done_bytes", absl::StrCat(view.done_bytes)},
       {"total_bytes", absl::StrCat(view.total_bytes)}});
}

absl::Status DrainingError() {
  return MakeError(Reason::kDraining, "the service is shutting down; connect again when it is back");
}

absl::Status NotResidentError(const WeightSetEntry& set, const WeightSetView& view) {
  std::string message = absl::StrCat("weight set ", set.fingerprint().hash, " is ", StateName(view.state));
  std::map<std::string, std::string> metadata = {{"fingerprint", set.fingerprint().hash},
                                                 {"state", StateName(view.state)}};
  if (!view.failure.ok()) {
    absl::StrAppend(&message, ": ", view.failure.message());
    metadata["cause"] = GetErrorDetails(view.failure).reason;
  }
  absl::StrAppend(&message, "; call Register to load it");
  return MakeError(Reason::kNotResident, message, metadata);
}

std::map<std::string, int64_t> BytesByDevice(const MemoryPlan& plan) {
  std::map<std::string, int64_t> bytes;
  for (const ShardMemory& shard : plan.shards) bytes[shard.device] += shard.slab_bytes;
  return bytes;
}

absl::Status CheckPlan(const MemoryPlan& plan) {
  bool is_sane = plan.read_bytes >= 0 && !plan.shards.empty();
  int64_t left_bytes = std::numeric_limits<int64_t>::max();  // so that no sum overflows
  for (const ShardMemory& shard : plan.shards) {
    is_sane = is_sane && shard.tensor_count >= 0 && shard.slab_bytes >= 0 && shard.slab_bytes <= left_bytes;
    if (!is_sane) break;
    left_bytes -= shard.slab_bytes;
  }
  if (is_sane) return absl::OkStatus();
  return MakeError(Reason::kProtocolError,
                   "the loader planned no shard, or a negative or unaddressable amount of memory, reading or tensors");
}

}  // namespace registry_internal

using namespace registry_internal;  // NOLINT(google-build-using-namespace): the registry's own

namespace {

constexpr size_t kMinPrefixDigits = 8;
constexpr size_t kFingerprintDigits = 64;

bool IsFingerprintPrefix(const std::string& text) {
  return text.size() >= kMinPrefixDigits && text.size() <= kFingerprintDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

absl::Status RankMissingError(const WeightSetEntry& set, int32_t rank) {
  const Placement& placement = set.placement();
  const std::string held = JoinRanks(placement.ranks);
  const std::map<std::string, std::string> metadata = {{"fingerprint", set.fingerprint().hash},
                                                       {"rank", absl::StrCat(rank)},
                                                       {"rank_count", absl::StrCat(placement.world_size)},
                                                       {"held_ranks", held}};
  if (rank < 0 || rank >= placement.world_size) {
    return MakeError(Reason::kRankOutOfRange,
                     absl::StrCat("rank ", rank, " is asked for but the weight set has ", placement.world_size,
                                  placement.world_size == 1 ? " rank" : " ranks", ", counted from 0"),
                     metadata);
  }
  return MakeError(Reason::kRankNotHere,
                   absl::StrCat("rank ", rank, " of weight set ", set.fingerprint().hash,
                                " is not held by this service, which holds ", held, " of ", placement.world_size,
                                ": ask the service that was told to hold it"),
                   metadata);
}

// What of `reserved_bytes` a load under way has not filled yet, going by what it has read.
int64_t UnfilledBytes(int64_t reserved_bytes, int64_t done_bytes, int64_t read_bytes) {
  if (read_bytes <= 0) return reserved_bytes;
  const double done = static_cast<double>(done_bytes) / static_cast<double>(read_bytes);
  return std::max<int64_t>(0, reserved_bytes - static_cast<int64_t>(done * static_cast<double>(reserved_bytes)));
}

}  // namespace

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this == &other) return *this;
  Drop();
  registry_ = std::exchange(other.registry_, nullptr);
  id_ = std::exchange(other.id_, 0);
  generation_ = std::exchange(other.generation_, 0);
  set_ = std::exchange(other.set_, nullptr);
  shard_ = std::exchange(other.shard_, nullptr);
  return *this;
}

void Lease::Drop() {
  shard_.reset();  // before the registry says that the memory is free
  if (auto registry = std::exchange(registry_, nullptr)) registry->DropLease(id_);
}

Subscription& Subscription::operator=(Subscription&& other) noexcept {
  if (this == &other) return *this;
  Cancel();
  cancel_ = std::exchange(other.cancel_, nullptr);
  return *this;
}

void Subscription::Cancel() {
  if (auto cancel = std::exchange(cancel_, nullptr)) cancel();
}

absl::StatusOr<DeviceMemory> NoDeviceMemory(const std::string& device) {
  return MakeError(Reason::kDeviceUnknown, absl::StrCat("device \"", device, "\" is not one of this service's"),
                   {{"device", device}, {"devices", kHostDevice}});
}

std::shared_ptr<Registry> Registry::Create(RegistryOptions options) {
  return std::shared_ptr<Registry>(new Registry(std::move(options)));
}

absl::StatusOr<Registry::Begun> Registry::Begin(NewWeightSet request) {
  Callbacks callbacks;
  Begun begun;
  {
    MutexLock lock(mutex_);
    const std::string hash = request.fingerprint.hash;
    WeightSetRef same = FindLocked(hash);
    while (same != nullptr && same->state_ == v1::WEIGHT_SET_STATE_DRAINING && same->vault_is_busy_) {
      vault_done_.Wait(mutex_);
      same = FindLocked(hash);
    }
    if (draining_) return DrainingError();
    if (same != nullptr && same->state_ == v1::WEIGHT_SET_STATE_DRAINING) return DrainingSetError(*same);
    if (same != nullptr && same->state_ != v1::WEIGHT_SET_STATE_FAILED) {
      NoteUse(*same);
      return Begun{same, false};
    }
    if (same != nullptr) Forget(same);
    begun = {std::make_shared<WeightSetEntry>(std::move(request)), true};
    begun.set->residency_.generation = LastGeneration(begun.set->fingerprint().hash);
    begun.set->residency_.register_time = options_.clock->WallNow();
    begun.set->register_steady_ = options_.clock->SteadyNow();
    sets_.push_back(begun.set);
    CollectObservers(*begun.set, &callbacks);
  }
  Call(callbacks);
  return begun;
}

absl::Status Registry::GrantMemory(const WeightSetRef& set, const MemoryPlan& plan) {
  RETURN_IF_ERROR(CheckPlan(plan));
  const BytesNeeded need = BytesByDevice(plan);
  while (true) {
    const absl::Status granted = TryGrantMemory(set, plan, need);
    if (!HasReason(granted, Reason::kMemoryExhausted)) return granted;
    RETURN_IF_ERROR(MakeRoom(need, granted));
  }
}

absl::Status Registry::TryGrantMemory(const WeightSetRef& set, const MemoryPlan& plan, BytesNeeded need) {
  ASSIGN_OR_RETURN(const auto memory, ReadMemory(need));
  Callbacks callbacks;
  {
    MutexLock lock(mutex_);
    if (!CanMove(set->state_, v1::WEIGHT_SET_STATE_LOADING)) {
      return IllegalMove(*set, set->state_, v1::WEIGHT_SET_STATE_LOADING);
    }
    RETURN_IF_ERROR(CheckAllMemory(need, memory, {}));
    set->read_bytes_ = plan.read_bytes;
    const auto on_host = need.find(kHostDevice);
    set->in_huge_pages_ = on_host != need.end() && FitsIntoHugePages(on_host->second, memory.at(kHostDevice));
    set->granted_steady_ = options_.clock->SteadyNow();
    Reserve(*set, std::move(need));
    Move(*set, v1::WEIGHT_SET_STATE_LOADING, &callbacks);
  }
  Call(callbacks);
  return absl::OkStatus();
}

absl::Status Registry::GrantMore(const WeightSetRef& set, const std::string& device, int64_t bytes) {
  if (bytes < 0) return MakeError(Reason::kInvalidArgument, absl::StrCat(bytes, " bytes of memory cannot be had"));
  while (true) {
    const absl::Status granted = TryGrantMore(set, device, bytes);
    if (!HasReason(granted, Reason::kMemoryExhausted)) return granted;
    RETURN_IF_ERROR(MakeRoom({{device, bytes}}, granted));
  }
}

absl::Status Registry::TryGrantMore(const WeightSetRef& set, const std::string& device, int64_t bytes) {
  ASSIGN_OR_RETURN(const auto memory, ReadMemory({{device, bytes}}));
  Callbacks callbacks;
  {
    MutexLock lock(mutex_);
    RETURN_IF_ERROR(CheckNotEnded(*set));
    if (set->state_ != v1::WEIGHT_SET_STATE_LOADING && !CanMove(set->state_, v1::WEIGHT_SET_STATE_LOADING)) {
      return IllegalMove(*set, set->state_, v1::WEIGHT_SET_STATE_LOADING);
    }
    RETURN_IF_ERROR(CheckAllMemory({{device, bytes}}, memory, {}));
    std::map<std::string, int64_t> reserved = set->reserved_;
    reserved[device] += bytes;
    Reserve(*set, std::move(reserved));
    set->read_bytes_ += bytes;
    if (set->state_ == v1::WEIGHT_SET_STATE_ALLOCATING) {
      set->granted_steady_ = options_.clock->SteadyNow();
      Move(*set, v1::WEIGHT_SET_STATE_LOADING, &callbacks);
    }
  }
  Call(callbacks);
  return absl::OkStatus();
}

void Registry::ReturnMemory(const WeightSetRef& set, const std::string& device, int64_t bytes) {
  MutexLock lock(mutex_);
  const auto found = set->reserved_.find(device);
  if (found == set->reserved_.end()) return;  // the set has ended meanwhile
  std::map<std::string, int64_t> reserved = set->reserved_;
  reserved[device] = std::max<int64_t>(0, found->second - bytes);
  Reserve(*set, std::move(reserved));
  set->read_bytes_ = std::max(set->done_bytes_, set->read_bytes_ - bytes);
}

void Registry::ReportFilled(const WeightSetRef& set, int64_t more_bytes) {
  Callbacks callbacks;
  {
    MutexLock lock(mutex_);
    if (set->state_ != v1::WEIGHT_SET_STATE_LOADING) return;
    set->done_bytes_ = std::clamp(set->done_bytes_ + more_bytes, set->done_bytes_, set->read_bytes_);
    for (const auto& [id, observer] : set->observers_) callbacks.push_back(observer);
  }
  Call(callbacks);
}

// Asks the machine and reads files: not to be called under the lock.
absl::StatusOr<std::map<std::string, DeviceMemory>> Registry::ReadMemory(
    const std::map<std::string, int64_t>& need) const {
  std::map<std::string, DeviceMemory> memory;
  for (const auto& [device, need_bytes] : need) {
    if (device == kHostDevice) {
      const HostMemory host = options_.host_memory();
      memory[device] = {host.available_bytes, host.limited_by, host.free_huge_page_bytes};
    } else {
      ASSIGN_OR_RETURN(memory[device], options_.device_memory(device));
    }
  }
  return memory;
}

// In place of what was reserved for it before.
void Registry::Reserve(WeightSetEntry& set, std::map<std::string, int64_t> bytes) {
  for (const auto& [device, reserved_bytes] : std::exchange(set.reserved_, std::move(bytes))) {
    const auto total = reserved_by_device_.find(device);
    total->second -= reserved_bytes;
    if (total->second == 0) reserved_by_device_.erase(total);
  }
  for (const auto& [device, reserved_bytes] : set.reserved_) {
    if (reserved_bytes != 0) reserved_by_device_[device] += reserved_bytes;
  }
}

// The host's pages are taken one by one as they are filled; a GPU's memory is taken as a whole, before a byte is read.
int64_t Registry::PromisedBytes(const std::string& device) const {
  int64_t promised_bytes = 0;
  for (const WeightSetRef& set : sets_) {
    const auto reserved = set->reserved_.find(device);
    if (!IsLoading(set->state_) || reserved == set->reserved_.end()) continue;
    if (device == kHostDevice ? set->in_huge_pages_ : set->has_progress_) continue;
    promised_bytes += UnfilledBytes(reserved->second, set->done_bytes_, set->read_bytes_);
  }
  return promised_bytes;
}

// Reserved huge pages are taken all at once, before a byte is read.
int64_t Registry::PromisedHugePageBytes() const {
  int64_t promised_bytes = 0;
  for (const WeightSetRef& set : sets_) {
    const auto reserved = set->reserved_.find(kHostDevice);
    const bool is_taking_them = IsLoading(set->state_) && set->in_huge_pages_ && !set->has_progress_;
    if (is_taking_them && reserved != set->reserved_.end()) promised_bytes += reserved->second;
  }
  return promised_bytes;
}

bool Registry::FitsIntoHugePages(int64_t need_bytes, const DeviceMemory& memory) const {
  return need_bytes >= kHugePageBytes && need_bytes <= memory.free_huge_page_bytes - PromisedHugePageBytes();
}

absl::Status Registry::ReportProgress(const WeightSetRef& set, v1::WeightSetState phase, int64_t done_bytes) {
  Callbacks callbacks;
  {
    MutexLock lock(mutex_);
    const bool stays = phase == set->state_ && phase != v1::WEIGHT_SET_STATE_ALLOCATING && IsLoading(phase);
    if (!stays && (phase != v1::WEIGHT_SET_STATE_VERIFYING || !CanMove(set->state_, phase))) {
      return IllegalMove(*set, set->state_, phase);
    }
    set->has_progress_ = true;
    set->done_bytes_ = std::clamp(done_bytes, set->done_bytes_, set->read_bytes_);
    if (stays) {
      for (const auto& [id, observer] : set->observers_) callbacks.push_back(observer);
    } else {
      Move(*set, phase, &callbacks);
    }
  }
  Call(callbacks);
  return absl::OkStatus();
}

void Registry::ReportAlive(const WeightSetRef& set) {
  Callbacks callbacks;
  {
    MutexLock lock(mutex_);
    for (const auto& [id, observer] : set->observers_) callbacks.push_back(observer);
  }
  Call(callbacks);
}

void Registry::Fail(const WeightSetRef& set, const absl::Status& cause) {
  Callbacks callbacks;
  std::vector<std::string> aliases;
  {
    MutexLock lock(mutex_);
    if (!CanMove(set->state_, v1::WEIGHT_SET_STATE_FAILED)) return;
    set->failure_ = cause;
    aliases = DropAliasesOf(*set);
    GiveMemoryBack(*set, &callbacks);
    Move(*set, v1::WEIGHT_SET_STATE_FAILED, &callbacks);
    ForgetOldFailures();
  }
  Call(callbacks);
  ForgetAliases(aliases);
}

absl::Status Registry::DrainingSetError(const WeightSetEntry& set) {
  const std::string& hash = set.fingerprint().hash;
  const int leases = CountLeases(set);
  if (leases == 0) {
    return MakeError(Reason::kKeeperRefused,
                     absl::StrCat("weight set ", hash,
                                  " is being released, but the keeper has not forgotten it: unregister it again"),
                     {{"fingerprint", hash}});
  }
  return MakeError(Reason::kLeased,
                   absl::StrCat("weight set ", hash, " is being released, and ", leases,
                                leases == 1 ? " lease still keeps" : " leases still keep",
                                " its memory: register it anew once no engine holds it, or unregister it with force"),
                   {{"fingerprint", hash}, {"lease_count", absl::StrCat(leases)}});
}

absl::Status Registry::CheckNotDraining(const WeightSetRef& set) const {
  MutexLock lock(mutex_);
  const bool is_left_over = set->state_ == v1::WEIGHT_SET_STATE_DRAINING && !set->vault_is_busy_;
  return is_left_over ? DrainingSetError(*set) : absl::OkStatus();
}

WeightSetRef Registry::Find(const std::string& fingerprint) const {
  MutexLock lock(mutex_);
  return FindLocked(fingerprint);
}

WeightSetRef Registry::FindLocked(const std::string& fingerprint) const {
  for (const WeightSetRef& set : sets_) {
    if (set->fingerprint().hash == fingerprint) return set;
  }
  return nullptr;
}

absl::StatusOr<WeightSetRef> Registry::FindByPrefix(const std::string& prefix) const {
  if (!IsFingerprintPrefix(prefix)) {
    return MakeError(Reason::kInvalidArgument,
                     absl::StrCat("fingerprint ", Quote(prefix), " is not ", kMinPrefixDigits, " to ",
                                  kFingerprintDigits, " lower-case hexadecimal digits"),
                     {{"field", "fingerprint"}});
  }
  std::vector<WeightSetRef> found;
  {
    MutexLock lock(mutex_);
    for (const WeightSetRef& set : sets_) {
      if (set->fingerprint().hash.compare(0, prefix.size(), prefix) == 0) found.push_back(set);
    }
  }
  if (found.empty()) {
    return MakeError(
        Reason::kWeightSetUnknown,
        absl::StrCat("no weight set has a fingerprint that starts with ", prefix, "; list shows those there are"),
        {{"fingerprint", prefix}});
  }
  if (found.size() > 1) {
    return MakeError(
        Reason::kWeightSetAmbiguous,
        absl::StrCat(found.size(), " weight sets have a fingerprint that starts with ", prefix, ", among them ",
                     found[0]->fingerprint().hash, " and ", found[1]->fingerprint().hash, ": give more digits"),
        {{"fingerprint", prefix}, {"matches", absl::StrCat(found.size())}});
  }
  return found.front();
}

std::vector<WeightSetRef> Registry::Sets() const {
  MutexLock lock(mutex_);
  return sets_;
}

std::vector<WeightSetRef> Registry::FindByModel(const std::string& model) const {
  std::vector<WeightSetRef> found;
  MutexLock lock(mutex_);
  for (const WeightSetRef& set : sets_) {
    const bool there = set->state_ == v1::WEIGHT_SET_STATE_RESIDENT || IsLoading(set->state_);
    if (there && set->spec().model() == model) found.push_back(set);
  }
  return found;
}

absl::StatusOr<size_t> Registry::FindShard(const WeightSetEntry& set, int32_t rank,
                                           const std::vector<v1::HandleKind>& kinds) const {
  if (draining_) return DrainingError();
  if (IsLoading(set.state_)) {
    return StillLoadingError(set, ViewLocked(set), "call Register with wait to see it through");
  }
  if (set.state_ != v1::WEIGHT_SET_STATE_RESIDENT) return NotResidentError(set, ViewLocked(set));
  const auto found =
      std::find_if(set.shards_.begin(), set.shards_.end(), [rank](const auto& shard) { return shard->rank == rank; });
  if (found == set.shards_.end()) return RankMissingError(set, rank);
  const Shard& shard = **found;
  const auto index = static_cast<size_t>(found - set.shards_.begin());
  if (!set.quarantines_[index].empty()) return QuarantinedError(set, rank, set.quarantines_[index]);
  if (!kinds.empty() && std::find(kinds.begin(), kinds.end(), shard.handle_kind) == kinds.end()) {
    const std::string wanted = JoinHandleKinds(kinds);
    return MakeError(Reason::kHandleKindUnsupported,
                     absl::StrCat("the weight set is held as ", HandleKindName(shard.handle_kind),
                                  ", fixed when it was registered, but the caller can map only ", wanted),
                     {{"handle_kind", HandleKindName(shard.handle_kind)}, {"wanted", wanted}});
  }
  return index;
}

absl::StatusOr<Lease> Registry::Acquire(const WeightSetRef& set, int32_t rank, const std::vector<v1::HandleKind>& kinds,
                                        LeaseEnded on_ended, LeaseEnded on_quarantined) {
  MutexLock lock(mutex_);
  ASSIGN_OR_RETURN(const size_t index, FindShard(*set, rank, kinds));
  Lease lease;
  lease.registry_ = shared_from_this();
  lease.id_ = ++last_lease_id_;
  lease.generation_ = set->residency_.generation;
  lease.set_ = set;
  lease.shard_ = set->shards_[index];
  leases_[lease.id_] = {set, index, std::move(on_ended), std::move(on_quarantined)};
  ++set->lease_counts_[index];
  NoteUse(*set);
  return lease;
}

absl::StatusOr<std::shared_ptr<const Shard>> Registry::Look(const WeightSetRef& set, int32_t rank,
                                                            const std::vector<v1::HandleKind>& kinds) const {
  MutexLock lock(mutex_);
  ASSIGN_OR_RETURN(const size_t index, FindShard(*set, rank, kinds));
  return set->shards_[index];
}

void Registry::DropLease(int64_t id) {
  Callbacks callbacks;
  LeaseRecord record;  // destroyed after the lock: its callback may hold what locks again
  {
    MutexLock lock(mutex_);
    const auto it = leases_.find(id);
    if (it == leases_.end()) return;  // ended by force
    record = std::move(it->second);
    leases_.erase(it);
    WeightSetEntry& set = *record.set;
    --set.lease_counts_[record.shard_index];
    NoteUse(set);
    // What the vault still has must not be given back, but for a broker that ends and leaves it to the next.
    const bool may_go = set.state_ == v1::WEIGHT_SET_STATE_DRAINING && (draining_ || set.vault_has_forgotten_);
    if (may_go && CountLeases(set) == 0) FinishRelease(record.set, &callbacks);
  }
  Call(callbacks);
}

int Registry::EndLeases(const WeightSetRef& set, const std::string& message, Callbacks* callbacks) {
  int ended = 0;
  for (auto it = leases_.begin(); it != leases_.end();) {
    if (it->second.set != set) {
      ++it;
      continue;
    }
    ++ended;
    if (it->second.on_ended) {
      callbacks->emplace_back([on_ended = std::move(it->second.on_ended), message] { on_ended(message); });
    }
    it = leases_.erase(it);
  }
  set->lease_counts_.assign(set->lease_counts_.size(), 0);
  return ended;
}

void Registry::BeginDrain() {
  Callbacks callbacks;
  {
    MutexLock lock(mutex_);
    if (draining_) return;
    draining_ = true;
    for (auto& [id, record] : leases_) {
      if (!record.on_ended) continue;
      callbacks.emplace_back([on_ended = std::exchange(record.on_ended, nullptr)] {
        on_ended("the service is shutting down; what is mapped stays valid");
      });
    }
    for (const WeightSetRef& set : std::vector<WeightSetRef>(sets_)) {
      if (set->state_ != v1::WEIGHT_SET_STATE_RESIDENT) continue;
      Move(*set, v1::WEIGHT_SET_STATE_DRAINING, &callbacks);
      if (CountLeases(*set) == 0) FinishRelease(set, &callbacks);
    }
    for (const auto& [id, observer] : state_observers_) callbacks.push_back(observer);
  }
  Call(callbacks);
}

absl::Status Registry::CheckServing() const {
  MutexLock lock(mutex_);
  return draining_ ? DrainingError() : absl::OkStatus();
}

Subscription Registry::Subscribe(const WeightSetRef& set, std::function<void()> changed) {
  MutexLock lock(mutex_);
  const int64_t id = ++last_subscription_id_;
  set->observers_[id] = std::move(changed);
  return Subscription([self = shared_from_this(), set, id] {
    MutexLock cancel_lock(self->mutex_);
    set->observers_.erase(id);
  });
}

Subscription Registry::SubscribeToStates(std::function<void()> changed) {
  MutexLock lock(mutex_);
  const int64_t id = ++last_subscription_id_;
  state_observers_[id] = std::move(changed);
  return Subscription([self = shared_from_this(), id] {
    MutexLock cancel_lock(self->mutex_);
    self->state_observers_.erase(id);
  });
}

void Registry::TellStateObservers() {
  Callbacks callbacks;
  {
    MutexLock lock(mutex_);
    for (const auto& [id, observer] : state_observers_) callbacks.push_back(observer);
  }
  Call(callbacks);
}

bool Registry::CanMove(v1::WeightSetState from, v1::WeightSetState to) {
  switch (to) {
    case v1::WEIGHT_SET_STATE_LOADING:
      return from == v1::WEIGHT_SET_STATE_ALLOCATING;
    case v1::WEIGHT_SET_STATE_VERIFYING:
      return from == v1::WEIGHT_SET_STATE_LOADING;
    case v1::WEIGHT_SET_STATE_RESIDENT:
      return from == v1::WEIGHT_SET_STATE_VERIFYING;
    case v1::WEIGHT_SET_STATE_DRAINING:
      return from == v1::WEIGHT_SET_STATE_RESIDENT;
    case v1::WEIGHT_SET_STATE_RELEASED:
      return from == v1::WEIGHT_SET_STATE_DRAINING;
    case v1::WEIGHT_SET_STATE_FAILED:
      return IsLoading(from) || from == v1::WEIGHT_SET_STATE_RESIDENT;
    default:
      return false;
  }
}

void Registry::Move(WeightSetEntry& set, v1::WeightSetState to, Callbacks* callbacks) {
  assert(CanMove(set.state_, to));  // what others send is checked before it gets here
  set.state_ = to;
  CollectObservers(set, callbacks);
}

void Registry::CollectObservers(const WeightSetEntry& set, Callbacks* callbacks) const {
  for (const auto& [id, observer] : set.observers_) callbacks->push_back(observer);
  for (const auto& [id, observer] : state_observers_) callbacks->push_back(observer);
}

int Registry::CountLeases(const WeightSetEntry& set) {
  return std::accumulate(set.lease_counts_.begin(), set.lease_counts_.end(), 0);
}

void Registry::GiveMemoryBack(WeightSetEntry& set, Callbacks* callbacks) {
  // Closing the last descriptor of a slab frees its pages, which takes the kernel a good part of a second for 8 GiB:
  // not under the lock, but when the callbacks go.
  callbacks->emplace_back([shards = std::exchange(set.shards_, {})] {});
  set.quarantines_.clear();
  Reserve(set, {});
}

void Registry::FinishRelease(const WeightSetRef& set, Callbacks* callbacks) {
  GiveMemoryBack(*set, callbacks);
  Move(*set, v1::WEIGHT_SET_STATE_RELEASED, callbacks);
  Forget(set);
}

void Registry::Forget(const WeightSetRef& set) {
  sets_.erase(std::remove(sets_.begin(), sets_.end(), set), sets_.end());
}

void Registry::ForgetOldFailures() {
  const auto failed = [](const WeightSetRef& set) { return set->state_ == v1::WEIGHT_SET_STATE_FAILED; };
  while (static_cast<size_t>(std::count_if(sets_.begin(), sets_.end(), failed)) > options_.max_failed_sets) {
    sets_.erase(std::find_if(sets_.begin(), sets_.end(), failed));
  }
}

}  // namespace weightbroker
