// Whether there is memory for a weight set, and what goes to make room for it: of the sets that nobody holds, pins or
// names by an alias, those not used for longest, as few as do, and none if all would not.

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "server/broker/registry.h"
#include "server/broker/registry_internal.h"

namespace weightbroker {

using namespace registry_internal;  // NOLINT(google-build-using-namespace): the registry's own

namespace {

constexpr std::chrono::milliseconds kPollInterval(20);
// In a message, which is cut when it is long.
constexpr size_t kMostHolders = 5;
constexpr size_t kShortFingerprint = 12;

// What was evicted has gone for nothing, since somebody still has its memory.
absl::Status NotFreeYet(const absl::Status& status, size_t evicted) {
  return MakeError(Reason::kMemoryExhausted,
                   absl::StrCat(status.message(), "; ", evicted,
                                evicted == 1 ? " weight set was evicted for it, whose memory is"
                                             : " weight sets were evicted for it, whose memory is",
                                " not free yet: an engine may still have it mapped whose lease was lost"),
                   GetErrorDetails(status).metadata);
}

// The most that weight sets may have there by a flag, or that a GPU has; 0 where neither says.
int64_t MostBytes(const RegistryOptions& options, const std::string& device, const DeviceMemory& memory) {
  if (device == kHostDevice) return options.memory_limit_bytes;
  const int64_t limit_bytes = options.device_memory_limit.Of(memory.total_bytes);
  return limit_bytes > 0 ? limit_bytes : memory.total_bytes;
}

// What would have them fit that is no matter of other weight sets.
std::string MoreMemory(const std::string& limited_by) {
  if (limited_by == "memory_limit" || limited_by == "device_memory_limit") return absl::StrCat("raise --", limited_by);
  if (limited_by == "cgroup") return "raise the cgroup's limit";
  return "end a process that holds memory there";
}

std::string WhatToDo(const DeviceRoom& room, int64_t most_bytes, bool evicts_idle) {
  if (most_bytes > 0 && room.need_bytes > most_bytes) {
    const bool has_limit = room.device == kHostDevice || room.limited_by == "device_memory_limit";
    const std::string flag = room.device == kHostDevice ? "--memory_limit" : "--device_memory_limit";
    return absl::StrCat("by themselves they exceed the ", most_bytes,
                        " bytes that there are at most, and no other set's "
                        "release would help: ",
                        has_limit ? absl::StrCat("raise ", flag, ", or ") : "", "have fewer of their ranks here");
  }
  if (room.reserved_bytes == 0) {
    return absl::StrCat("no other weight set has any of it whose release would help: ", MoreMemory(room.limited_by));
  }
  return absl::StrCat(evicts_idle ? "none that could be evicted make enough room: unregister one"
                                  : "none is evicted for them (--eviction=refuse): unregister one, start the service "
                                    "with --eviction=idle",
                      ", or ", MoreMemory(room.limited_by));
}

}  // namespace

void Registry::NoteUse(WeightSetEntry& set) {
  set.last_use_ = ++use_count_;
  set.last_use_time_ = options_.clock->WallNow();
}

// ---- What there is.

Registry::FreedByDevice Registry::MemoryOf(const WeightSetEntry& set) {
  FreedByDevice freed;
  for (const auto& shard : set.shards_) {
    int64_t huge_page_bytes = 0;
    for (const v1::Slab& slab : shard->slabs) {
      if (slab.page_kind() == v1::PAGE_KIND_HUGETLB) huge_page_bytes += slab.size_bytes();
    }
    freed[shard->device].huge_page_bytes += huge_page_bytes;
    freed[shard->device].bytes += shard->size_bytes - huge_page_bytes;
  }
  return freed;
}

Registry::FreedByDevice Registry::SumOf(const std::vector<WeightSetRef>& sets) {
  FreedByDevice sum;
  for (const WeightSetRef& set : sets) {
    for (const auto& [device, freed] : MemoryOf(*set)) {
      sum[device].bytes += freed.bytes;
      sum[device].huge_page_bytes += freed.huge_page_bytes;
    }
  }
  return sum;
}

// Once sets have gone that give `freed` back.
DeviceRoom Registry::RoomOn(const std::string& device, int64_t need_bytes, DeviceMemory memory,
                            const FreedByDevice& freed) const {
  const auto reserved = reserved_by_device_.find(device);
  DeviceRoom room{.device = device,
                  .need_bytes = need_bytes,
                  .have_bytes = memory.available_bytes - PromisedBytes(device),
                  .limited_by = memory.limited_by,
                  .reserved_bytes = reserved == reserved_by_device_.end() ? 0 : reserved->second,
                  .evictable_bytes = 0};
  if (const auto found = freed.find(device); found != freed.end()) {
    room.have_bytes += found->second.bytes;
    room.reserved_bytes -= found->second.bytes + found->second.huge_page_bytes;
    memory.free_huge_page_bytes += found->second.huge_page_bytes;
  }
  // The loader takes reserved huge pages where there are enough, and those are no part of what is available otherwise.
  if (FitsIntoHugePages(need_bytes, memory)) room.have_bytes = std::max(room.have_bytes, need_bytes);
  const bool on_host = device == kHostDevice;
  const int64_t limit_bytes =
      on_host ? options_.memory_limit_bytes : options_.device_memory_limit.Of(memory.total_bytes);
  if (limit_bytes > 0 && limit_bytes - room.reserved_bytes < room.have_bytes) {
    room.have_bytes = limit_bytes - room.reserved_bytes;
    room.limited_by = on_host ? "memory_limit" : "device_memory_limit";
  }
  room.have_bytes = std::max<int64_t>(0, room.have_bytes);
  return room;
}

// The sets that have memory there, for a message.
std::string Registry::DescribeHolders(const std::string& device) const {
  std::vector<std::string> holders;
  size_t left_out = 0;
  for (const WeightSetRef& set : sets_) {
    const auto reserved = set->reserved_.find(device);
    if (reserved == set->reserved_.end() || reserved->second == 0) continue;
    if (holders.size() == kMostHolders) {
      ++left_out;
      continue;
    }
    const int leases = CountLeases(*set);
    holders.push_back(absl::StrCat(set->fingerprint().hash.substr(0, kShortFingerprint), " (", reserved->second,
                                   " bytes, ", IsLoading(set->state_) ? "being loaded, " : "", leases,
                                   leases == 1 ? " lease" : " leases", set->pins_.any() ? ", pinned" : "",
                                   AliasesOf(*set).empty() ? "" : ", named by an alias", ")"));
  }
  if (left_out > 0) holders.push_back(absl::StrCat("and ", left_out, " more"));
  return absl::StrJoin(holders, ", ");
}

// MEMORY_EXHAUSTED for the first device that lacks it.
absl::Status Registry::CheckAllMemory(const BytesNeeded& need, const MemoryByDevice& memory,
                                      const FreedByDevice& freed) const {
  for (const auto& [device, need_bytes] : need) {
    const DeviceMemory& there = memory.at(device);
    const DeviceRoom room = RoomOn(device, need_bytes, there, freed);
    if (need_bytes <= room.have_bytes) continue;
    std::map<std::string, std::string> metadata = {{"device", device},
                                                   {"need_bytes", absl::StrCat(need_bytes)},
                                                   {"have_bytes", absl::StrCat(room.have_bytes)},
                                                   {"reserved_bytes", absl::StrCat(room.reserved_bytes)},
                                                   {"limited_by", room.limited_by},
                                                   {"eviction", options_.evicts_idle ? "idle" : "refuse"}};
    const int64_t most_bytes = MostBytes(options_, device, there);
    if (most_bytes > 0) metadata["limit_bytes"] = absl::StrCat(most_bytes);
    if (!there.holders.empty()) metadata["holders"] = there.holders;
    const std::string sets = DescribeHolders(device);
    if (!sets.empty()) metadata["weight_sets"] = sets;
    return MakeError(Reason::kMemoryExhausted,
                     absl::StrCat("the weights need ", need_bytes, " bytes on ", device, " but only ", room.have_bytes,
                                  " are to be had (limited by ", room.limited_by,
                                  most_bytes > 0 ? absl::StrCat(", at most ", most_bytes, " for all weight sets") : "",
                                  "; ", room.reserved_bytes, " are taken by other weight sets",
                                  sets.empty() ? "" : absl::StrCat(": ", sets),
                                  there.holders.empty() ? "" : absl::StrCat("; processes there: ", there.holders),
                                  "): ", WhatToDo(room, most_bytes, options_.evicts_idle)),
                     metadata);
  }
  return absl::OkStatus();
}

bool Registry::AllFit(const BytesNeeded& need, const MemoryByDevice& memory, const FreedByDevice& freed) const {
  return std::all_of(need.begin(), need.end(), [&](const auto& wanted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return wanted.second <= RoomOn(wanted.first, wanted.second, memory.at(wanted.first), freed).have_bytes;
  });
}

// ---- What could go.

// Those not used for longest first.
std::vector<WeightSetRef> Registry::IdleSets() const {
  std::vector<std::pair<int64_t, WeightSetRef>> by_use;
  for (const WeightSetRef& set : sets_) {
    const bool is_idle = set->state_ == v1::WEIGHT_SET_STATE_RESIDENT && CountLeases(*set) == 0;
    if (!is_idle || set->pins_.any() || set->vault_is_busy_ || !AliasesOf(*set).empty()) continue;
    by_use.emplace_back(set->last_use_, set);
  }
  std::sort(by_use.begin(), by_use.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<WeightSetRef> idle;
  for (auto& [last_use, set] : by_use) idle.push_back(std::move(set));
  return idle;
}

// Whether a set with `by_set` has memory where it is missing still.
bool Registry::HelpsOnShortDevice(const FreedByDevice& by_set, const BytesNeeded& need, const MemoryByDevice& memory,
                                  const FreedByDevice& freed) const {
  return std::any_of(need.begin(), need.end(), [&](const auto& wanted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto& [device, need_bytes] = wanted;
    return by_set.count(device) > 0 && need_bytes > RoomOn(device, need_bytes, memory.at(device), freed).have_bytes;
  });
}

std::vector<WeightSetRef> Registry::ChooseEvictions(const BytesNeeded& need, const MemoryByDevice& memory) const {
  std::vector<WeightSetRef> chosen;
  for (const WeightSetRef& set : IdleSets()) {
    const FreedByDevice freed = SumOf(chosen);
    if (AllFit(need, memory, freed)) break;
    if (HelpsOnShortDevice(MemoryOf(*set), need, memory, freed)) chosen.push_back(set);
  }
  if (!AllFit(need, memory, SumOf(chosen))) return {};  // nothing goes for nothing
  // Later ones may have made earlier ones unnecessary; of those the ones that were used last stay.
  for (size_t i = chosen.size(); i-- > 0;) {
    std::vector<WeightSetRef> others = chosen;
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
    if (AllFit(need, memory, SumOf(others))) chosen = std::move(others);
  }
  return chosen;
}

absl::StatusOr<RoomPlan> Registry::PlanRoom(const MemoryPlan& plan) const {
  RETURN_IF_ERROR(CheckPlan(plan));
  const BytesNeeded need = BytesByDevice(plan);
  ASSIGN_OR_RETURN(const MemoryByDevice memory, ReadMemory(need));
  MutexLock lock(mutex_);
  RoomPlan result{.fits = AllFit(need, memory, {}), .devices = {}, .evictions = {}};
  FreedByDevice evictable = SumOf(IdleSets());
  for (const auto& [device, need_bytes] : need) {
    DeviceRoom& room = result.devices.emplace_back(RoomOn(device, need_bytes, memory.at(device), {}));
    room.evictable_bytes = evictable[device].bytes + evictable[device].huge_page_bytes;
  }
  if (result.fits || !options_.evicts_idle) return result;
  for (const WeightSetRef& set : ChooseEvictions(need, memory)) result.evictions.push_back(DescribeLocked(*set));
  result.fits = !result.evictions.empty();
  return result;
}

// ---- Making room.

// Ok if there may be enough now. Otherwise MEMORY_EXHAUSTED, or as the vault fails.
absl::Status Registry::MakeRoom(const BytesNeeded& need, const absl::Status& short_of) {
  if (!options_.evicts_idle) return short_of;
  MutexLock eviction_lock(eviction_mutex_);
  ASSIGN_OR_RETURN(const MemoryByDevice memory, ReadMemory(need));
  Callbacks callbacks;
  std::vector<std::pair<WeightSetRef, v1::WeightSet>> evicted;
  {
    MutexLock lock(mutex_);
    if (AllFit(need, memory, {})) return absl::OkStatus();  // somebody else has made room
    for (const WeightSetRef& set : ChooseEvictions(need, memory)) {
      evicted.emplace_back(set, DescribeLocked(*set));
      set->vault_is_busy_ = true;
      Move(*set, v1::WEIGHT_SET_STATE_DRAINING, &callbacks);  // nobody gets a lease from here on
    }
    if (evicted.empty()) return CheckAllMemory(need, memory, {});
  }
  Call(callbacks);
  absl::Status forgotten;
  for (const auto& [set, description] : evicted) {
    const absl::Status status = FinishForgetting(set);
    if (status.ok() && options_.on_evicted) options_.on_evicted(description);
    forgotten.Update(status);
  }
  RETURN_IF_ERROR(forgotten);
  const absl::Status room = WaitForRoom(need);
  return HasReason(room, Reason::kMemoryExhausted) ? NotFreeYet(room, evicted.size()) : room;
}

// A released set's memory is free once the last process has closed its descriptors, and a GPU's a while after that.
absl::Status Registry::WaitForRoom(const BytesNeeded& need) const {
  const auto give_up = std::chrono::steady_clock::now() + options_.eviction_patience;
  while (true) {
    ASSIGN_OR_RETURN(const MemoryByDevice memory, ReadMemory(need));
    absl::Status status;
    {
      MutexLock lock(mutex_);
      status = CheckAllMemory(need, memory, {});
    }
    if (status.ok() || std::chrono::steady_clock::now() >= give_up) return status;
    std::this_thread::sleep_for(kPollInterval);
  }
}

}  // namespace weightbroker
