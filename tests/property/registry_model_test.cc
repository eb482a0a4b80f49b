// Random sequences of everything that can happen to the registry, with a model beside it that says what must have come
// of each: $WEIGHTBROKER_MODEL_SEQUENCES of them, from $WEIGHTBROKER_SEED on. Each sequence has a seed of its own,
// which is printed when it fails; WEIGHTBROKER_SEED=<that> WEIGHTBROKER_MODEL_SEQUENCES=1 repeats it alone.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <list>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/broker/registry.h"
#include "tests/property/remembering_vault.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using testing::RememberingVault;

constexpr char kGpu[] = "GPU-a";
constexpr int64_t kHostLimit = 100 << 20;
constexpr int64_t kGpuTotal = 80 << 20;
constexpr int kGpuPercent = 75;
constexpr int kFingerprints = 6;
constexpr int kSteps = 60;

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

std::string Hash(int number) { return std::string(64, static_cast<char>('a' + number)); }
std::string Short(const std::string& fingerprint) { return fingerprint.substr(0, 1); }
std::string AliasName(int number) { return absl::StrCat("model@", number); }

using Bytes = std::map<std::string, int64_t>;  // by device

struct ModelSet {
  v1::WeightSetState state = v1::WEIGHT_SET_STATE_ALLOCATING;
  bool pinned = false;
  std::vector<RankPlacement> ranks = {};
  Bytes bytes = {};
  int64_t last_use = 0;
  std::map<int32_t, int> leases = {};  // by rank

  bool is_loading() const {
    return state == v1::WEIGHT_SET_STATE_ALLOCATING || state == v1::WEIGHT_SET_STATE_LOADING ||
           state == v1::WEIGHT_SET_STATE_VERIFYING;
  }
  bool is_resident() const { return state == v1::WEIGHT_SET_STATE_RESIDENT; }
  int CountLeases() const {
    int count = 0;
    for (const auto& [rank, leases_of_rank] : leases) count += leases_of_rank;
    return count;
  }
};

struct HeldLease {
  Lease lease;
  std::string fingerprint;
  int32_t rank = 0;
  std::string alias;
  bool ended = false;                   // by force: the registry counts it no more
  std::vector<std::string> superseded;  // the fingerprints that its holder was told of
  std::vector<std::string> expected;    // and those that it should have been
};

class Sequence {
 public:
  Sequence(uint64_t seed, bool evicts) : random_(seed), evicts_(evicts) { Start(); }

  void Run() {
    for (int step = 0; step < kSteps && !::testing::Test::HasFailure(); ++step) {
      Step();
      Check();
    }
    if (!::testing::Test::HasFailure()) End();
  }

  std::string Describe() const { return absl::StrJoin(steps_, "\n"); }

 private:
  int Pick(int count) { return std::uniform_int_distribution<int>(0, count - 1)(random_); }
  bool Chance(int percent) { return Pick(100) < percent; }
  void Note(const std::string& step) { steps_.push_back(step); }

  void Start() {
    registry_ = Registry::Create(
        {.memory_limit_bytes = kHostLimit,
         .host_memory =
             [] {
               return HostMemory{int64_t{1} << 40, "machine"};
             },
         .device_memory = [](const std::string&) -> absl::StatusOr<DeviceMemory> {
           return DeviceMemory{.available_bytes = int64_t{1} << 40, .limited_by = "device", .total_bytes = kGpuTotal};
         },
         .vault = &vault_,
         .device_memory_limit = {.percent = kGpuPercent},
         .evicts_idle = evicts_,
         .on_evicted = [this](const v1::WeightSet& set) { evicted_.push_back(set.fingerprint()); }});
    refs_.clear();
  }

  // What a device's sets may have in all.
  static int64_t LimitOf(const std::string& device) {
    return device == kHostDevice ? kHostLimit : kGpuTotal * kGpuPercent / 100;
  }

  Bytes Reserved(const std::set<std::string>& without = {}) const {
    Bytes sum;
    for (const auto& [fingerprint, set] : model_) {
      if (without.count(fingerprint) > 0 || set.state == v1::WEIGHT_SET_STATE_FAILED) continue;
      for (const auto& [device, bytes] : set.bytes) sum[device] += bytes;
    }
    return sum;
  }

  bool Fits(const Bytes& need, const std::set<std::string>& without = {}) const {
    Bytes reserved = Reserved(without);
    return std::all_of(need.begin(), need.end(), [&](const auto& wanted) {
      return reserved[wanted.first] + wanted.second <= LimitOf(wanted.first);
    });
  }

  bool IsAliased(const std::string& fingerprint) const {
    return std::any_of(aliases_.begin(), aliases_.end(),
                       [&](const auto& alias) { return alias.second == fingerprint; });
  }

  // Those that were used before `last_use`.
  std::set<std::string> IdleBefore(int64_t last_use) const {
    std::set<std::string> idle;
    for (const auto& [fingerprint, set] : model_) {
      if (set.is_resident() && set.CountLeases() == 0 && !set.pinned && !IsAliased(fingerprint) &&
          set.last_use < last_use) {
        idle.insert(fingerprint);
      }
    }
    return idle;
  }

  void Step() {
    switch (Pick(14)) {
      case 0:
      case 1:
        return Begin();
      case 2:
      case 3:
        return Grant();
      case 4:
      case 5:
        return MakeResident();
      case 6:
        return Fail();
      case 7:
        return Acquire();
      case 8:
        return AcquireByAlias();
      case 9:
        return Drop();
      case 10:
        return Release();
      case 11:
        return SetAlias();
      case 12:
        return Chance(50) ? DeleteAlias() : Pin();
      default:
        if (Chance(25)) return NextBroker();
        return Drop();
    }
  }

  // A random set in the model for which `suits`; nothing if there is none.
  template <typename Suits>
  std::optional<std::string> Choose(Suits suits) {
    std::vector<std::string> found;
    for (const auto& [fingerprint, set] : model_) {
      if (suits(set)) found.push_back(fingerprint);
    }
    if (found.empty()) return std::nullopt;
    return found[static_cast<size_t>(Pick(static_cast<int>(found.size())))];
  }

  static bool Any(const ModelSet&) { return true; }

  // ---- Loads.

  void Begin() {
    const std::string fingerprint = Hash(Pick(kFingerprints));
    NewWeightSet request;
    request.fingerprint.hash = fingerprint;
    request.pins.by_caller = Chance(15);
    request.placement.world_size = 2;
    request.placement.ranks = {{0, Chance(50) ? kHostDevice : kGpu}};
    if (Chance(40)) request.placement.ranks.push_back({1, Chance(50) ? kHostDevice : kGpu});
    Note(absl::StrCat("Begin ", Short(fingerprint), request.pins.any() ? " pinned" : ""));
    const auto begun = registry_->Begin(request);
    const auto there = model_.find(fingerprint);
    if (there != model_.end() && there->second.state == v1::WEIGHT_SET_STATE_DRAINING) {
      EXPECT_THAT(begun, testing::StatusIs(Reason::kLeased)) << "its memory is still held";
      return;
    }
    ASSERT_TRUE(begun.ok()) << begun.status();
    const bool is_new = there == model_.end() || there->second.state == v1::WEIGHT_SET_STATE_FAILED;
    EXPECT_EQ(begun->is_new, is_new);
    if (!is_new) {
      there->second.last_use = ++clock_;
      return;
    }
    refs_[fingerprint] = begun->set;
    model_[fingerprint] = {.pinned = request.pins.any(), .ranks = request.placement.ranks};
  }

  void Grant() {
    const auto fingerprint = Choose([](const ModelSet& set) { return set.state == v1::WEIGHT_SET_STATE_ALLOCATING; });
    if (!fingerprint.has_value()) return;
    ModelSet& set = model_[*fingerprint];
    MemoryPlan plan{.shards = {}, .read_bytes = 100};
    Bytes need;
    for (const RankPlacement& rank : set.ranks) {
      const int64_t bytes = int64_t{1 + Pick(45)} << 20;
      plan.shards.push_back({rank.rank, rank.device, bytes, 1});
      need[rank.device] += bytes;
    }
    const auto planned = registry_->PlanRoom(plan);
    evicted_.clear();
    const absl::Status granted = registry_->GrantMemory(refs_[*fingerprint], plan);
    Note(absl::StrCat(
        "Grant ", Short(*fingerprint), " ", granted.ok() ? "ok" : "refused", ", evicted ",
        absl::StrJoin(evicted_, " ", [](std::string* out, const std::string& e) { out->append(Short(e)); })));
    ASSERT_TRUE(planned.ok()) << planned.status();
    EXPECT_EQ(planned->fits, granted.ok());
    std::vector<std::string> foreseen;
    for (const v1::WeightSet& eviction : planned->evictions) foreseen.push_back(eviction.fingerprint());
    EXPECT_EQ(foreseen, evicted_) << "a dry run says what a load does";
    CheckEvictions(need, granted.ok());
    for (const std::string& gone : evicted_) model_.erase(gone);
    if (!granted.ok()) {
      EXPECT_THAT(granted, testing::StatusIs(Reason::kMemoryExhausted));
      return;
    }
    set.state = v1::WEIGHT_SET_STATE_LOADING;
    set.bytes = need;
  }

  void CheckEvictions(const Bytes& need, bool granted) {
    constexpr int64_t kAlways = std::numeric_limits<int64_t>::max();
    const std::set<std::string> gone(evicted_.begin(), evicted_.end());
    if (!granted) {
      EXPECT_TRUE(gone.empty()) << "something went for nothing";
      EXPECT_FALSE(Fits(need, evicts_ ? IdleBefore(kAlways) : std::set<std::string>())) << "there was room";
      return;
    }
    EXPECT_TRUE(Fits(need, gone));
    const std::set<std::string> idle = IdleBefore(kAlways);
    int64_t last_use = -1;
    for (const std::string& fingerprint : evicted_) {
      EXPECT_EQ(idle.count(fingerprint), 1u) << Short(fingerprint) << " was in use, pinned or named by an alias";
      EXPECT_GT(model_[fingerprint].last_use, last_use) << "not the oldest first";
      last_use = model_[fingerprint].last_use;
      std::set<std::string> fewer = gone;
      fewer.erase(fingerprint);
      EXPECT_FALSE(Fits(need, fewer)) << Short(fingerprint) << " went for nothing";
    }
    EXPECT_TRUE(gone.empty() || !Fits(need, IdleBefore(last_use))) << "older ones would have done";
  }

  std::shared_ptr<const Shard> MakeShard(const RankPlacement& rank, int64_t size_bytes) {
    auto shard = std::make_shared<Shard>();
    shard->rank = rank.rank;
    shard->device = rank.device;
    shard->size_bytes = size_bytes;
    // What stands for the memory: it is counted until nobody has it any more.
    live_[rank.device] += size_bytes;
    shard->slab_fds = std::shared_ptr<const std::vector<UniqueFd>>(
        new std::vector<UniqueFd>(), [this, device = rank.device, size_bytes](const std::vector<UniqueFd>* fds) {
          live_[device] -= size_bytes;
          delete fds;
        });
    return shard;
  }

  void MakeResident() {
    const auto fingerprint = Choose([](const ModelSet& set) { return set.is_loading(); });
    if (!fingerprint.has_value()) return;
    ModelSet& set = model_[*fingerprint];
    std::vector<std::shared_ptr<const Shard>> shards;
    Bytes bytes;
    for (const RankPlacement& rank : set.ranks) {
      const int64_t share = set.bytes[rank.device] / static_cast<int64_t>(set.ranks.size());
      shards.push_back(MakeShard(rank, share));
      bytes[rank.device] += share;
    }
    const bool fails = Chance(10);
    vault_.FailNext(fails ? "Keep" : "");
    const bool granted = set.state != v1::WEIGHT_SET_STATE_ALLOCATING;
    const absl::Status made = registry_->MakeResident(refs_[*fingerprint], std::move(shards), 100);
    vault_.FailNext("");
    Note(absl::StrCat("MakeResident ", Short(*fingerprint), made.ok() ? "" : " refused"));
    EXPECT_EQ(made.ok(), granted && !fails) << made;
    if (!granted) return;
    if (!made.ok()) {
      registry_->Fail(refs_[*fingerprint], made);
      set.state = v1::WEIGHT_SET_STATE_FAILED;
      set.bytes.clear();
      return;
    }
    set.state = v1::WEIGHT_SET_STATE_RESIDENT;
    set.bytes = bytes;
    set.last_use = ++clock_;
    const int64_t generation = registry_->View(refs_[*fingerprint]).generation;
    EXPECT_GT(generation, generations_[*fingerprint]) << "a generation was given out twice";
    generations_[*fingerprint] = generation;
    for (const RankPlacement& rank : set.ranks) set.leases[rank.rank] = 0;
  }

  void Fail() {
    const auto fingerprint = Choose([](const ModelSet& set) { return set.is_loading(); });
    if (!fingerprint.has_value()) return;
    Note(absl::StrCat("Fail ", Short(*fingerprint)));
    registry_->Fail(refs_[*fingerprint], MakeError(Reason::kLoaderFailed, "it died"));
    model_[*fingerprint].state = v1::WEIGHT_SET_STATE_FAILED;
    model_[*fingerprint].bytes.clear();
  }

  // ---- Leases.

  // Takes a lease on rank 0 or 1, which the set may not have.
  HeldLease* Hold(const std::string& fingerprint) {
    const int32_t rank = Chance(80) ? 0 : 1;
    ModelSet& set = model_[fingerprint];
    HeldLease& held = leases_.emplace_back();
    auto lease = registry_->Acquire(refs_[fingerprint], rank, {}, [&held](const std::string&) { held.ended = true; });
    Note(absl::StrCat("Acquire ", Short(fingerprint), "/", rank, lease.ok() ? "" : " refused"));
    EXPECT_EQ(lease.ok(), set.is_resident() && set.leases.count(rank) > 0) << lease.status();
    if (!lease.ok()) {
      leases_.pop_back();
      return nullptr;
    }
    held.lease = *std::move(lease);
    held.fingerprint = fingerprint;
    held.rank = rank;
    ++set.leases[rank];
    set.last_use = ++clock_;
    return &held;
  }

  void Acquire() {
    if (const auto fingerprint = Choose(Any); fingerprint.has_value()) Hold(*fingerprint);
  }

  void AcquireByAlias() {
    const std::string alias = AliasName(Pick(3));
    const auto found = registry_->FindByAlias(alias);
    const auto named = aliases_.find(alias);
    ASSERT_EQ(found.ok(), named != aliases_.end()) << found.status();
    if (!found.ok()) return;
    ASSERT_EQ((*found)->fingerprint().hash, named->second);
    HeldLease* const held = Hold(named->second);
    if (held == nullptr) return;
    held->alias = alias;
    registry_->Follow(held->lease, alias, [held](const std::string&, const std::string& fingerprint) {
      held->superseded.push_back(fingerprint);
    });
  }

  void Drop() {
    if (leases_.empty()) return;
    auto held = leases_.begin();
    std::advance(held, Pick(static_cast<int>(leases_.size())));
    Note(absl::StrCat("Drop ", Short(held->fingerprint)));
    const std::string fingerprint = held->fingerprint;
    ModelSet& set = model_[fingerprint];
    --set.leases[held->rank];
    set.last_use = ++clock_;
    leases_.erase(held);
    if (set.state == v1::WEIGHT_SET_STATE_DRAINING && set.CountLeases() == 0) model_.erase(fingerprint);
  }

  // ---- Ends.

  void Release() {
    const auto fingerprint = Choose(Any);
    if (!fingerprint.has_value()) return;
    const bool force = Chance(30);
    ModelSet& set = model_[*fingerprint];
    const bool refused = set.is_loading() || (!force && (set.CountLeases() > 0 || IsAliased(*fingerprint)));
    const auto released =
        force ? registry_->ReleaseByForce(refs_[*fingerprint]) : registry_->Release(refs_[*fingerprint]);
    Note(absl::StrCat(force ? "ReleaseByForce " : "Release ", Short(*fingerprint), released.ok() ? "" : " refused"));
    EXPECT_EQ(released.ok(), !refused) << released.status();
    if (!released.ok()) return;
    EXPECT_EQ(released->ended_leases, set.CountLeases());
    for (auto& held : leases_) EXPECT_EQ(held.fingerprint == *fingerprint, held.ended);
    EraseAliasesOf(*fingerprint);
    model_.erase(*fingerprint);
    // A lease that has ended is as good as none.
    leases_.remove_if([](const HeldLease& held) { return held.ended; });
  }

  void EraseAliasesOf(const std::string& fingerprint) {
    for (auto it = aliases_.begin(); it != aliases_.end();) {
      it = it->second == fingerprint ? aliases_.erase(it) : std::next(it);
    }
  }

  // ---- Aliases and pins.

  void SetAlias() {
    const auto fingerprint = Choose(Any);
    if (!fingerprint.has_value()) return;
    AliasChange change{.name = AliasName(Pick(3)), .set = refs_[*fingerprint]};
    const auto named = aliases_.find(change.name);
    const std::string now = named == aliases_.end() ? "" : named->second;
    if (Chance(30)) change.expected_fingerprint = Chance(70) ? now : Hash(Pick(kFingerprints));
    change.release_previous = Chance(30);
    const bool moves = !now.empty() && now != *fingerprint;
    const bool is_resident = model_[*fingerprint].is_resident();
    const bool is_expected =
        now == *fingerprint || !change.expected_fingerprint.has_value() || *change.expected_fingerprint == now;
    const bool shared =
        moves && change.release_previous &&
        std::count_if(aliases_.begin(), aliases_.end(), [&](const auto& alias) { return alias.second == now; }) > 1;
    if (!moves && !now.empty()) change.release_previous = false;  // the one before that is not in the model
    const bool fails = Chance(10);
    vault_.FailNext(fails ? "KeepAlias" : "");
    const auto changed = registry_->SetAlias(change);
    vault_.FailNext("");
    Note(absl::StrCat("SetAlias ", change.name, " ", Short(*fingerprint), change.release_previous ? " releasing" : "",
                      changed.ok() ? "" : " refused"));
    EXPECT_EQ(changed.ok(), is_resident && is_expected && !shared && !fails) << changed.status();
    if (!changed.ok()) return;
    aliases_[change.name] = *fingerprint;
    int told = 0;
    for (HeldLease& held : leases_) {
      if (now == *fingerprint || held.alias != change.name || held.fingerprint == *fingerprint) continue;
      held.expected.push_back(*fingerprint);
      ++told;
    }
    EXPECT_EQ(changed->superseded_leases, told);
    if (!moves || !change.release_previous) return;
    ModelSet& previous = model_[now];
    previous.state = v1::WEIGHT_SET_STATE_DRAINING;
    if (previous.CountLeases() == 0) model_.erase(now);
  }

  void DeleteAlias() {
    const std::string name = AliasName(Pick(3));
    const auto deleted = registry_->DeleteAlias(name, std::nullopt);
    Note(absl::StrCat("DeleteAlias ", name));
    EXPECT_EQ(deleted.ok(), aliases_.erase(name) > 0) << deleted.status();
  }

  void Pin() {
    const auto fingerprint = Choose([](const ModelSet& set) { return set.is_resident() || set.is_loading(); });
    if (!fingerprint.has_value()) return;
    Note(absl::StrCat("Pin ", Short(*fingerprint)));
    EXPECT_TRUE(registry_->Pin(refs_[*fingerprint], PinOwner::kCaller).ok());
    model_[*fingerprint].pinned = true;
  }

  // ---- Another broker.

  void NextBroker() {
    Note("NextBroker");
    leases_.clear();
    refs_.clear();
    registry_.reset();
    Start();
    for (auto it = model_.begin(); it != model_.end();)
      it = it->second.is_resident() ? std::next(it) : model_.erase(it);
    Adoption left = vault_.TakeAdoption();
    ASSERT_EQ(left.sets.size(), model_.size()) << "what is resident, and nothing else, is left to the next broker";
    registry_->AdoptGenerations(left.generations);
    for (Adoption::Set& kept : left.sets) {
      const std::string fingerprint = kept.request.fingerprint.hash;
      ASSERT_EQ(model_.count(fingerprint), 1u);
      auto adopted = registry_->Adopt(std::move(kept));
      ASSERT_TRUE(adopted.ok()) << adopted.status();
      refs_[fingerprint] = *adopted;
      ModelSet& set = model_[fingerprint];
      for (auto& [rank, leases] : set.leases) leases = 0;
      set.last_use = ++clock_;
    }
    for (const KeptAlias& alias : left.aliases) EXPECT_TRUE(registry_->AdoptAlias(alias).ok()) << alias.name;
  }

  // Everything is let go of: no memory may be left.
  void End() {
    Note("End");
    leases_.clear();
    for (const WeightSetRef& set : registry_->Sets()) {
      if (registry_->View(set).state == v1::WEIGHT_SET_STATE_FAILED) continue;
      if (!registry_->ReleaseByForce(set).ok()) registry_->Fail(set, MakeError(Reason::kCancelled, "the end"));
    }
    EXPECT_EQ(registry_->Totals().reserved_bytes, 0);
    EXPECT_TRUE(vault_.sets().empty());
    EXPECT_TRUE(vault_.aliases().empty());
    for (const auto& [device, bytes] : live_) EXPECT_EQ(bytes, 0) << "memory leaked on " << device;
  }

  // ---- What must hold after each step.

  void Check() {
    const RegistryTotals totals = registry_->Totals();
    Bytes reserved = Reserved();
    Bytes live;
    std::erase_if(reserved, [](const auto& of_device) { return of_device.second == 0; });
    EXPECT_EQ(totals.reserved_by_device, reserved);
    EXPECT_EQ(totals.lease_count, static_cast<int>(leases_.size()));
    EXPECT_EQ(registry_->Sets().size(), model_.size());
    std::set<std::string> kept;
    for (const auto& [fingerprint, set] : model_) {
      CheckSet(fingerprint, set);
      const bool has_memory = set.is_resident() || set.state == v1::WEIGHT_SET_STATE_DRAINING;
      for (const auto& [device, bytes] : set.bytes) live[device] += has_memory ? bytes : 0;
      if (set.is_resident()) kept.insert(fingerprint);
    }
    for (const auto& [device, bytes] : live_) EXPECT_EQ(bytes, live[device]) << "memory on " << device;
    CheckAliases();
    EXPECT_EQ(vault_.sets().size(), kept.size()) << "the vault has what is resident, and nothing else";
    for (const auto& [fingerprint, set] : vault_.sets()) {
      EXPECT_EQ(kept.count(fingerprint), 1u);
      EXPECT_EQ(set.shards.size(), set.request.placement.ranks.size());
      EXPECT_EQ(set.request.pins.any(), model_[fingerprint].pinned);
    }
    for (const HeldLease& held : leases_) EXPECT_EQ(held.superseded, held.expected) << held.alias;
  }

  void CheckSet(const std::string& fingerprint, const ModelSet& set) {
    const v1::WeightSet found = registry_->Describe(refs_[fingerprint]);
    EXPECT_EQ(found.state(), set.state) << Short(fingerprint);
    EXPECT_EQ(found.pinned(), set.pinned) << Short(fingerprint);
    const bool has_shards = set.is_resident() || set.state == v1::WEIGHT_SET_STATE_DRAINING;
    EXPECT_EQ(static_cast<size_t>(found.shards_size()), has_shards ? set.ranks.size() : 0) << Short(fingerprint);
    for (const v1::Shard& shard : found.shards()) EXPECT_EQ(shard.lease_count(), set.leases.at(shard.rank()));
  }

  void CheckAliases() {
    std::map<std::string, std::string> found;
    for (const KeptAlias& alias : registry_->Aliases()) found[alias.name] = alias.fingerprint;
    EXPECT_EQ(found, aliases_);
    std::map<std::string, std::string> kept;
    for (const auto& [name, alias] : vault_.aliases()) kept[name] = alias.fingerprint;
    EXPECT_EQ(kept, aliases_) << "in the vault";
    for (const auto& [name, fingerprint] : aliases_) {
      EXPECT_TRUE(model_[fingerprint].is_resident()) << name << " names a set that is not resident";
    }
  }

  std::mt19937_64 random_;
  const bool evicts_;
  Bytes live_;  // first: shards that go count down here
  RememberingVault vault_;
  std::shared_ptr<Registry> registry_;
  std::map<std::string, WeightSetRef> refs_;  // by fingerprint
  std::vector<std::string> evicted_;

  std::map<std::string, ModelSet> model_;       // by fingerprint
  std::map<std::string, std::string> aliases_;  // to fingerprints
  std::map<std::string, int64_t> generations_;  // the last one of each fingerprint
  std::list<HeldLease> leases_;                 // where callbacks find them
  int64_t clock_ = 0;
  std::vector<std::string> steps_;
};

TEST(RegistryModel, HoldsForEverySequenceOfOperations) {
  const uint64_t first_seed = FromEnvironment("WEIGHTBROKER_SEED", std::random_device{}());
  const uint64_t sequences = FromEnvironment("WEIGHTBROKER_MODEL_SEQUENCES", 2'000);
  printf("seed %llu, %llu sequences of %d steps\n", static_cast<unsigned long long>(first_seed),
         static_cast<unsigned long long>(sequences), kSteps);
  for (uint64_t i = 0; i < sequences; ++i) {
    const uint64_t seed = first_seed + i;
    Sequence sequence(seed, /*evicts=*/seed % 4 != 0);
    sequence.Run();
    if (HasFailure()) {
      ADD_FAILURE() << "in the sequence of seed " << seed << ":\n" << sequence.Describe();
      return;
    }
  }
}

}  // namespace
}  // namespace weightbroker
