// What is resident on this node, what is being made so, and who holds it: weight sets, their states, memory
// reservations and leases. It knows neither gRPC nor CUDA nor processes; see load_manager.h for who drives it.
//
//   ASSIGN_OR_RETURN(auto begun, registry->Begin({spec, environment, fingerprint}));  // joins one that is there
//   RETURN_IF_ERROR(registry->GrantMemory(begun.set, plan));                          // MEMORY_EXHAUSTED: need, have
//   RETURN_IF_ERROR(registry->MakeResident(begun.set, std::move(shards), read_bytes));
//   auto lease = registry->Acquire(begun.set, /*rank=*/0, {}, on_ended);              // STILL_LOADING, DRAINING, ...
//   if (!lease.ok()) return lease.status();                                           // dropped when *lease goes
//
// Thread-safe. Callbacks are called without the lock on the sets, from whichever thread caused them. While an alias
// moves, and while sets are evicted, the next of either waits until the callbacks have returned: they must begin
// neither.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/log.h"
#include "common/base/mutex.h"
#include "common/identity/fingerprint.h"
#include "common/memory/host_memory.h"
#include "common/memory/memory_limit.h"
#include "server/broker/clock.h"
#include "server/broker/names.h"
#include "server/broker/placement.h"
#include "server/broker/shard.h"
#include "server/broker/vault.h"
#include "server/broker/weight_set.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker {

// What a loader says that one rank's shard will need.
struct ShardMemory {
  int32_t rank = 0;
  std::string device = kHostDevice;
  int64_t slab_bytes = 0;
  int64_t tensor_count = 0;
};

// What a loader says it will need in all.
struct MemoryPlan {
  std::vector<ShardMemory> shards;  // by rank
  int64_t read_bytes = 0;           // each byte once, however many ranks want it
};

// One registration of a weight set. Whoever holds a reference can ask for its state at any time, also after it has
// ended; a reference does not keep the memory.
class WeightSetEntry {
 public:
  explicit WeightSetEntry(NewWeightSet request) : request_(std::move(request)), pins_(request_.pins) {}

  const v1::WeightSpec& spec() const { return request_.spec; }
  const v1::Environment& environment() const { return request_.environment; }
  const Fingerprint& fingerprint() const { return request_.fingerprint; }
  const Placement& placement() const { return request_.placement; }
  const CheckpointIdentity& identity() const { return *request_.identity; }
  const std::shared_ptr<const CheckpointIdentity>& shared_identity() const { return request_.identity; }

 private:
  friend class Registry;

  const NewWeightSet request_;

  // Guarded by the registry's mutex from here on.
  // ALLOCATING → LOADING → VERIFYING → RESIDENT → DRAINING → RELEASED; the first four → FAILED. See Registry::CanMove.
  // A set that was adopted begins in RESIDENT.
  v1::WeightSetState state_ = v1::WEIGHT_SET_STATE_ALLOCATING;
  int64_t read_bytes_ = 0;                   // to be read in all; 0 until memory has been granted
  std::map<std::string, int64_t> reserved_;  // by device; counted in Registry::reserved_by_device_
  bool in_huge_pages_ = false;  // what has been granted is to be had from the machine's reserved huge pages
  bool has_progress_ = false;   // the loader has said so, and thus has allocated what it was granted
  int64_t done_bytes_ = 0;
  absl::Status failure_;
  std::vector<std::shared_ptr<const Shard>> shards_;  // by rank, every one held here; while RESIDENT or DRAINING
  std::vector<std::string> quarantines_;              // of each of them: why it is in quarantine; empty if it is not
  std::vector<int> lease_counts_;                     // of each of them; RELEASED only when all are 0
  bool vault_is_busy_ = false;                        // with this set's shards, for a release, a pin or a quarantine
  bool vault_has_forgotten_ = false;                  // its shards: what is left of them is the leases'
  Pins pins_;
  Pins kept_pins_;        // as the vault knows them
  int64_t last_use_ = 0;  // by Registry::use_count_
  std::chrono::system_clock::time_point last_use_time_;
  Residency residency_;  // its generation is the last one's, and only the time of registration is set, until RESIDENT
  std::chrono::system_clock::time_point adopt_time_;  // the epoch for a set that this broker has loaded
  std::chrono::steady_clock::time_point register_steady_;
  std::chrono::steady_clock::time_point granted_steady_;
  std::map<int64_t, std::function<void()>> observers_;  // by subscription id
};
using WeightSetRef = std::shared_ptr<WeightSetEntry>;

// What a weight set looks like at one moment.
struct WeightSetView {
  v1::WeightSetState state = v1::WEIGHT_SET_STATE_UNSPECIFIED;
  int64_t generation = 0;
  std::chrono::system_clock::time_point resident_time;  // the epoch until it is resident
  int64_t done_bytes = 0;
  int64_t total_bytes = 0;
  double rate_bytes_per_second = 0;
  std::optional<double> seconds_left;  // at that rate
  absl::Status failure;                // the cause, in state FAILED
  Pins pins;
};

// Sums over all weight sets at one moment.
struct RegistryTotals {
  std::map<v1::WeightSetState, int> sets_by_state;
  int64_t resident_shards = 0;
  int64_t resident_bytes = 0;
  int64_t resident_tensors = 0;
  int64_t quarantined_shards = 0;
  int64_t publisher_writable_shards = 0;  // on GPUs, whose publishers have not exited yet
  int64_t reserved_bytes = 0;
  std::map<std::string, int64_t> reserved_by_device;
  int lease_count = 0;
  int pinned_sets = 0;
  int alias_count = 0;
  bool draining = false;

  int CountLoads() const;
  int CountResident() const;
};

class Registry;

// A hold on one shard: its memory stays for as long as this lives, unless an operator forces it out. Move-only; not
// thread-safe. It keeps the registry.
class Lease {
 public:
  Lease() = default;
  Lease(Lease&& other) noexcept { *this = std::move(other); }
  Lease& operator=(Lease&& other) noexcept;
  ~Lease() { Drop(); }

  bool held() const { return registry_ != nullptr; }
  int64_t id() const { return id_; }
  int64_t generation() const { return generation_; }
  const WeightSetRef& set() const { return set_; }
  const std::shared_ptr<const Shard>& shard() const { return shard_; }

  // Gives it back. Harmless when there is none.
  void Drop();

 private:
  friend class Registry;

  std::shared_ptr<Registry> registry_;
  int64_t id_ = 0;
  int64_t generation_ = 0;
  WeightSetRef set_;
  std::shared_ptr<const Shard> shard_;
};

// Calls its callback until it goes. A call that is under way in another thread may still end after it has gone, so a
// callback should hold what it uses weakly. Move-only.
class Subscription {
 public:
  Subscription() = default;
  explicit Subscription(std::function<void()> cancel) : cancel_(std::move(cancel)) {}
  Subscription(Subscription&& other) noexcept : cancel_(std::exchange(other.cancel_, nullptr)) {}
  Subscription& operator=(Subscription&& other) noexcept;
  ~Subscription() { Cancel(); }
  void Cancel();

 private:
  std::function<void()> cancel_;
};

// What a device would still allow.
struct DeviceMemory {
  int64_t available_bytes = 0;
  std::string limited_by = {};       // for people
  int64_t free_huge_page_bytes = 0;  // of the host, which are no part of the others
  std::string holders = {};          // the processes that use it, for people; empty if nobody knows
  int64_t total_bytes = 0;           // of another device than the host, for a limit that is a part of it
};

// What a set would need on one device, and what there is.
struct DeviceRoom {
  std::string device;
  int64_t need_bytes = 0;
  int64_t have_bytes = 0;
  std::string limited_by;
  int64_t reserved_bytes = 0;   // by weight sets
  int64_t evictable_bytes = 0;  // of these, by such that could be evicted
};

// What a grant of memory would come to.
struct RoomPlan {
  bool fits = false;  // once `evictions` have gone
  std::vector<DeviceRoom> devices;
  std::vector<v1::WeightSet> evictions;  // in their order; empty if it fits without, or not even so
};

// What an alias is to name.
struct AliasChange {
  std::string name;
  WeightSetRef set = nullptr;
  std::optional<std::string> expected_fingerprint = {};  // that it names now; empty: it must not exist
  bool release_previous = false;
};

struct AliasChanged {
  KeptAlias alias;
  int superseded_leases = 0;
  std::optional<v1::WeightSet> released;  // the set that it named before, DRAINING or RELEASED, if that was asked for
};

// Fingerprint, generation, ranks, tensors and bytes of all its shards.
LogFields DescribeForLog(const v1::WeightSet& set);

// DEVICE_UNKNOWN: of a service that has no device but the host.
absl::StatusOr<DeviceMemory> NoDeviceMemory(const std::string& device);

struct RegistryOptions {
  int64_t memory_limit_bytes = 0;  // on the host, for all sets together; 0 for no limit but the machine's
  std::function<HostMemory()> host_memory = [] { return ReadHostMemory(); };
  // Of another device than the host, by name; an error refuses whoever wants memory there.
  std::function<absl::StatusOr<DeviceMemory>(const std::string& device)> device_memory = NoDeviceMemory;
  const Clock* clock = &RealClock();     // must outlive the registry
  size_t max_failed_sets = 32;           // older ones are forgotten
  size_t max_generations = 1024;         // of fingerprints without a set; those not resident for longest are forgotten
  ShardVault* vault = &NoVault();        // must outlive the registry
  MemoryLimit device_memory_limit = {};  // on each other device
  bool evicts_idle = false;              // where memory is missing; else whoever wants it is refused
  // From the release of a set to its memory being free: descriptors are closed in several processes.
  std::chrono::milliseconds eviction_patience{5'000};
  // Called for each set that is evicted, as it was, without a lock held. May be empty.
  std::function<void(const v1::WeightSet& set)> on_evicted = {};
  size_t max_aliases = 1024;
};

class Registry : public std::enable_shared_from_this<Registry> {
 public:
  // Says, in a sentence for people, why a lease has ended that its holder did not drop.
  using LeaseEnded = std::function<void(const std::string& message)>;

  // Says that the alias by which a lease was taken names the set with `fingerprint` now.
  using Superseded = std::function<void(const std::string& alias, const std::string& fingerprint)>;

  static std::shared_ptr<Registry> Create(RegistryOptions options);

  // ---- Making a set resident. One caller a set drives these, in this order.

  struct Begun {
    WeightSetRef set;
    bool is_new = false;  // the caller must now load it; otherwise someone has, or does
  };
  // Finds the set with this fingerprint, or starts a new one in ALLOCATING. One that failed is forgotten and started
  // anew; the release of one that nobody holds is waited for. DRAINING once the service is, or as CheckNotDraining.
  absl::StatusOr<Begun> Begin(NewWeightSet request);

  // Reserves memory for all of the plan, on every device or on none: ALLOCATING → LOADING. MEMORY_EXHAUSTED with need,
  // have, and what limits where, PROTOCOL_ERROR if the plan makes no sense or memory has been granted before. Where the
  // options say so, sets that nobody uses are evicted for it first: as few as do, and none if all would not.
  absl::Status GrantMemory(const WeightSetRef& set, const MemoryPlan& plan);

  // Reserves so much more on one device, for a set that grows as it is published: ALLOCATING → LOADING, or stays in
  // LOADING. Fails as GrantMemory, and with CANCELLED if the set has ended.
  absl::Status GrantMore(const WeightSetRef& set, const std::string& device, int64_t bytes);

  // Takes back what GrantMore gave and nobody could use.
  void ReturnMemory(const WeightSetRef& set, const std::string& device, int64_t bytes);

  // Counts memory of a set that is published as filled, as far as it has been granted.
  void ReportFilled(const WeightSetRef& set, int64_t more_bytes);

  // Moves on in LOADING or to VERIFYING; bytes never go back. PROTOCOL_ERROR for any other move.
  absl::Status ReportProgress(const WeightSetRef& set, v1::WeightSetState phase, int64_t done_bytes);

  // Tells subscribers that the load is alive though nothing moved.
  void ReportAlive(const WeightSetRef& set);

  // Gives every shard, by rank, to the vault and, once it has them all, makes them exportable at once: → RESIDENT,
  // generation + 1. PROTOCOL_ERROR if the shards are not those of the set's placement, or on any device take more than
  // was granted there (but for the last page of each slab), or the load is not that far; CANCELLED if the set has ended
  // meanwhile; or as ShardVault::Keep fails. Then the vault has none of them.
  absl::Status MakeResident(const WeightSetRef& set, std::vector<std::shared_ptr<const Shard>> shards,
                            int64_t read_bytes);

  // → FAILED with its cause; the memory is given back. Does nothing to a set that has ended.
  void Fail(const WeightSetRef& set, const absl::Status& cause);

  // Takes over a set that another broker has made resident: → RESIDENT, as it was, whatever the memory limit: the
  // memory has been taken already. PROTOCOL_ERROR if there is a set with this fingerprint.
  absl::StatusOr<WeightSetRef> Adopt(Adoption::Set adopted);

  // LEASED with the count if the set is being released and leases still keep its memory, KEEPER_REFUSED if its release
  // has failed: it cannot be registered anew yet.
  absl::Status CheckNotDraining(const WeightSetRef& set) const;

  // What GrantMemory of such a plan would come to now. Changes nothing. Fails only where a device cannot be asked, or
  // with PROTOCOL_ERROR as GrantMemory does.
  absl::StatusOr<RoomPlan> PlanRoom(const MemoryPlan& plan) const;

  // From now on it is not evicted, nor under a later broker. Fails as ShardVault::Keep, and the set is as it was.
  absl::Status Pin(const WeightSetRef& set, PinOwner owner);

  // Takes that owner's pin back: unless another has pinned it, it may be evicted, as any other. Fails likewise.
  absl::Status Unpin(const WeightSetRef& set, PinOwner owner);

  // Goes on counting where another broker has left off.
  void AdoptGenerations(const std::map<std::string, int64_t>& generations);

  // ---- Finding sets.

  // The set with this fingerprint in any state it is listed in, or nullptr.
  WeightSetRef Find(const std::string& fingerprint) const;

  // The one set whose fingerprint starts with `prefix` (at least 8 hexadecimal digits, else INVALID_ARGUMENT).
  // WEIGHT_SET_UNKNOWN or WEIGHT_SET_AMBIGUOUS otherwise.
  absl::StatusOr<WeightSetRef> FindByPrefix(const std::string& prefix) const;

  // All of them, oldest first, failed ones included.
  std::vector<WeightSetRef> Sets() const;

  // The sets of one resolved model path that are resident or on their way there, oldest first.
  std::vector<WeightSetRef> FindByModel(const std::string& model) const;

  WeightSetView View(const WeightSetRef& set) const;
  v1::WeightSet Describe(const WeightSetRef& set) const;
  std::vector<v1::WeightSet> List() const;  // oldest first, failed ones included
  RegistryTotals Totals() const;

  // ---- Holding shards.

  // Takes a lease on the shard of `rank`. Fails with STILL_LOADING (and the progress), NOT_RESIDENT, DRAINING,
  // RANK_OUT_OF_RANGE, RANK_NOT_HERE if the set has such a rank and this service does not hold it, or
  // HANDLE_KIND_UNSUPPORTED if `kinds` is not empty and lacks the shard's, QUARANTINED. `on_ended` is called at most
  // once, if the lease ends before it is dropped or the service drains; `on_quarantined` at most once, if the shard is
  // put in quarantine while the lease is held.
  absl::StatusOr<Lease> Acquire(const WeightSetRef& set, int32_t rank, const std::vector<v1::HandleKind>& kinds,
                                LeaseEnded on_ended, LeaseEnded on_quarantined = nullptr);

  // The shard without a lease, refused as Acquire would.
  absl::StatusOr<std::shared_ptr<const Shard>> Look(const WeightSetRef& set, int32_t rank,
                                                    const std::vector<v1::HandleKind>& kinds) const;

  // ---- Quarantine. registry_quarantine.cc

  // Puts a resident shard in quarantine, for good: nobody gets a lease on it any more, whoever holds one is told, and
  // the vault keeps that it is so. False if there is no such shard, or it is in quarantine already. If the vault fails
  // the shard is in quarantine nevertheless, and `kept` says so.
  struct QuarantineResult {
    bool is_new = false;
    absl::Status kept;
  };
  QuarantineResult Quarantine(const WeightSetRef& set, int32_t rank, const std::string& why);

  // QUARANTINED, naming rank and cause, if any shard of the set is.
  absl::Status CheckNotQuarantined(const WeightSetRef& set) const;

  // The resident shards that are not in quarantine, of all sets or those of one; on one device if that is not empty.
  struct PlacedShard {
    WeightSetRef set;
    std::shared_ptr<const Shard> shard;
  };
  std::vector<PlacedShard> HealthyShards(const WeightSetRef& of_set = nullptr, const std::string& device = "") const;

  // ---- Ending sets.

  struct Released {
    v1::WeightSet set;  // as it was left
    int ended_leases = 0;
  };
  // Releases a resident set without leases, or forgets a failed one; the vault forgets it first. LEASED with the count,
  // ALIASED with their names, STILL_LOADING if a load is under way. If the vault fails, so does this, with the set in
  // DRAINING: release it again.
  absl::StatusOr<Released> Release(const WeightSetRef& set);

  // The same in spite of leases, which end, and of aliases, which are deleted. A load under way must have been ended
  // before: see LoadManager::Cancel.
  absl::StatusOr<Released> ReleaseByForce(const WeightSetRef& set);

  // Lets nobody in any more and ends every lease; each set is released here when its last lease is dropped. The vault
  // keeps what it has, for the next broker.
  void BeginDrain();

  // DRAINING from then on: that a set is not here any more says nothing of the next broker. To be asked after the set
  // has been looked for.
  absl::Status CheckServing() const;

  // ---- Aliases. Each names one resident set, from one moment to the next; the vault knows of it first.

  // Has an alias name another set, or a first one. INVALID_ARGUMENT for its name, NOT_RESIDENT, ALIAS_CONFLICT with
  // what it names (`found`) and what it should (`expected`), ALIASED if the set to be released has another alias,
  // TOO_MANY_REQUESTS for more aliases than there may be, DRAINING, or as ShardVault::KeepAlias fails. If the vault
  // cannot forget the set that is to be released, this fails with the alias moved and that set in DRAINING.
  absl::StatusOr<AliasChanged> SetAlias(const AliasChange& change);

  // Gives it as it was. Fails as FindByAlias, with ALIAS_CONFLICT, or as ShardVault::ForgetAlias.
  absl::StatusOr<KeptAlias> DeleteAlias(const std::string& name,
                                        const std::optional<std::string>& expected_fingerprint);

  // The set that it names. INVALID_ARGUMENT for what is no such name, ALIAS_UNKNOWN with those whose names are near, or
  // DRAINING.
  absl::StatusOr<WeightSetRef> FindByAlias(const std::string& name) const;

  std::vector<KeptAlias> Aliases() const;  // by name

  // Takes over what another broker had an alias name. NOT_RESIDENT if that set is not here.
  absl::Status AdoptAlias(const KeptAlias& alias);

  // Has the holder of `lease` told when `alias`, by which it was taken, names another set than the lease's: at once if
  // it does already. Of moves that follow each other closely, and as closely on this, the last to be told of may not be
  // the last.
  void Follow(const Lease& lease, const std::string& alias, Superseded on_superseded);

  // ---- Watching.

  // Calls `changed` whenever the set moves: state, bytes, or a sign of life.
  Subscription Subscribe(const WeightSetRef& set, std::function<void()> changed);

  // Calls `changed` whenever any set changes state or the service drains; not for progress.
  Subscription SubscribeToStates(std::function<void()> changed);

  // Calls all of those, though no set has changed: what they go by besides has.
  void TellStateObservers();

 private:
  // Collected under the lock, called after it.
  using Callbacks = std::vector<std::function<void()>>;

  struct LeaseRecord {
    WeightSetRef set;
    size_t shard_index = 0;  // into its shards_
    LeaseEnded on_ended;
    LeaseEnded on_quarantined;
    std::string alias = {};  // that it was taken by; empty for none
    Superseded on_superseded = {};
  };

  struct AliasEntry {
    WeightSetRef set;
    std::string previous_fingerprint;
    std::chrono::system_clock::time_point move_time;
  };

  // Memory that sets on one device give back.
  struct Freed {
    int64_t bytes = 0;
    int64_t huge_page_bytes = 0;  // of the host's reserved huge pages
  };
  using FreedByDevice = std::map<std::string, Freed>;
  using MemoryByDevice = std::map<std::string, DeviceMemory>;
  using BytesNeeded = std::map<std::string, int64_t>;  // by device

  using ShardList = std::vector<std::shared_ptr<const Shard>>;  // by rank

  enum class LeasePolicy { kRefuse, kEnd };

  struct GenerationRecord {
    int64_t generation = 0;
    int64_t last_use = 0;  // by use_count_
  };

  friend class Lease;

  explicit Registry(RegistryOptions options) : options_(std::move(options)) {}

  void DropLease(int64_t id);
  WeightSetRef FindLocked(const std::string& fingerprint) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static absl::Status DrainingSetError(const WeightSetEntry& set);
  absl::Status TryGrantMemory(const WeightSetRef& set, const MemoryPlan& plan, BytesNeeded need);
  absl::Status TryGrantMore(const WeightSetRef& set, const std::string& device, int64_t bytes);

  static bool CanMove(v1::WeightSetState from, v1::WeightSetState to);
  static int CountLeases(const WeightSetEntry& set);
  void Move(WeightSetEntry& set, v1::WeightSetState to, Callbacks* callbacks) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CollectObservers(const WeightSetEntry& set, Callbacks* callbacks) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GiveMemoryBack(WeightSetEntry& set, Callbacks* callbacks) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // registry_residency.cc
  absl::StatusOr<Residency> PrepareResidency(const WeightSetRef& set, const ShardList& shards, int64_t read_bytes);
  absl::Status CheckNotEnded(const WeightSetEntry& set) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status KeepShards(WeightSetEntry& set, const Residency& residency, const ShardList& shards);
  absl::Status ForgetShards(const WeightSetEntry& set, const std::vector<int32_t>& ranks);
  static absl::Status CheckShards(const WeightSetEntry& set, const ShardList& shards);
  absl::Status CommitResidency(const WeightSetRef& set, const Residency& residency, ShardList shards);
  void PlaceShards(WeightSetEntry& set, const Residency& residency, ShardList shards)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t LastGeneration(const std::string& fingerprint) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteGeneration(const std::string& fingerprint, int64_t generation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ForgetOldGenerations();
  absl::StatusOr<Released> ReleaseWith(LeasePolicy policy, const WeightSetRef& set);
  absl::Status CheckNotLeased(const WeightSetEntry& set) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status FinishForgetting(const WeightSetRef& set);
  absl::Status KeepPins(const WeightSetRef& set);
  // registry_eviction.cc
  absl::Status MakeRoom(const BytesNeeded& need, const absl::Status& short_of);
  absl::Status WaitForRoom(const BytesNeeded& need) const;
  absl::Status CheckAllMemory(const BytesNeeded& need, const MemoryByDevice& memory, const FreedByDevice& freed) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  DeviceRoom RoomOn(const std::string& device, int64_t need_bytes, DeviceMemory memory,
                    const FreedByDevice& freed) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string DescribeHolders(const std::string& device) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<WeightSetRef> IdleSets() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool AllFit(const BytesNeeded& need, const MemoryByDevice& memory, const FreedByDevice& freed) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HelpsOnShortDevice(const FreedByDevice& by_set, const BytesNeeded& need, const MemoryByDevice& memory,
                          const FreedByDevice& freed) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<WeightSetRef> ChooseEvictions(const BytesNeeded& need, const MemoryByDevice& memory) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static FreedByDevice MemoryOf(const WeightSetEntry& set);
  static FreedByDevice SumOf(const std::vector<WeightSetRef>& sets);
  void NoteUse(WeightSetEntry& set) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // registry_alias.cc
  std::vector<std::string> AliasesOf(const WeightSetEntry& set) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckNotAliased(const WeightSetEntry& set) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<KeptAlias> PrepareAlias(const AliasChange& change) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckExpected(const std::string& name, const std::optional<std::string>& expected_fingerprint) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<std::string> AliasNames() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static absl::Status AliasUnknown(const std::string& name, std::vector<std::string> known);
  int TellSuperseded(const std::string& alias, const WeightSetRef& set, Callbacks* callbacks)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  WeightSetRef CommitAlias(const KeptAlias& alias, const WeightSetRef& set) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes them off the map; the vault is to forget them after that, without the lock.
  std::vector<std::string> DropAliasesOf(const WeightSetEntry& set) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ForgetAliases(const std::vector<std::string>& names);
  void UndoKeptAlias(const std::string& name);
  absl::StatusOr<std::optional<v1::WeightSet>> ReleaseOnceUnleased(const WeightSetRef& set);

  void Forget(const WeightSetRef& set) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ForgetOldFailures() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishRelease(const WeightSetRef& set, Callbacks* callbacks) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int EndLeases(const WeightSetRef& set, const std::string& message, Callbacks* callbacks)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::map<std::string, DeviceMemory>> ReadMemory(const std::map<std::string, int64_t>& need) const;
  // What loads under way have been granted and is still there for others to see.
  int64_t PromisedBytes(const std::string& device) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t PromisedHugePageBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool FitsIntoHugePages(int64_t need_bytes, const DeviceMemory& memory) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Reserve(WeightSetEntry& set, std::map<std::string, int64_t> bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<size_t> FindShard(const WeightSetEntry& set, int32_t rank,
                                   const std::vector<v1::HandleKind>& kinds) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  WeightSetView ViewLocked(const WeightSetEntry& set) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  v1::WeightSet DescribeLocked(const WeightSetEntry& set) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const RegistryOptions options_;

  mutable Mutex mutex_;
  Mutex alias_mutex_;     // held while an alias is changed, by the vault, too; always taken before mutex_
  Mutex eviction_mutex_;  // held while sets are evicted, so that it is done for one at a time; before mutex_
  std::map<std::string, AliasEntry> aliases_ ABSL_GUARDED_BY(mutex_);
  CondVar vault_done_;                                      // with a set's shards
  std::vector<WeightSetRef> sets_ ABSL_GUARDED_BY(mutex_);  // oldest first; one a fingerprint, none RELEASED
  std::map<std::string, GenerationRecord> generations_ ABSL_GUARDED_BY(mutex_);  // by fingerprint; kept after release
  int64_t use_count_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, int64_t> reserved_by_device_ ABSL_GUARDED_BY(mutex_);  // devices with any
  std::map<int64_t, LeaseRecord> leases_ ABSL_GUARDED_BY(mutex_);
  int64_t last_lease_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int64_t, std::function<void()>> state_observers_ ABSL_GUARDED_BY(mutex_);
  int64_t last_subscription_id_ ABSL_GUARDED_BY(mutex_) = 0;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace weightbroker
