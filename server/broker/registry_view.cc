// What the registry shows of itself.

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/strings.h"
#include "server/broker/registry.h"
#include "server/broker/registry_internal.h"
#include "server/broker/timestamp.h"

namespace weightbroker {
namespace {

// By the process that has published it.
bool MayBeWritten(const Shard& shard) { return shard.publisher != nullptr && shard.publisher->may_run(); }

void DescribeShard(const Shard& shard, int lease_count, const std::string& quarantine, v1::Shard* proto) {
  proto->set_rank(shard.rank);
  proto->set_device(shard.device);
  proto->set_handle_kind(shard.handle_kind);
  proto->set_size_bytes(shard.size_bytes);
  proto->set_tensor_count(shard.tensor_count);
  *proto->mutable_slabs() = {shard.slabs.begin(), shard.slabs.end()};
  proto->set_lease_count(lease_count);
  proto->set_quarantine(quarantine);
  if (const absl::Status exportable = CheckExportable(shard); !exportable.ok()) {
    proto->set_export_refusal(std::string(exportable.message()));
  }
  if (MayBeWritten(shard)) {
    proto->set_publisher_writable(true);
    proto->set_publisher_process_id(shard.publisher->pid());
  }
}

}  // namespace

LogFields DescribeForLog(const v1::WeightSet& set) {
  std::vector<RankPlacement> ranks;
  int64_t tensors = 0;
  int64_t bytes = 0;
  for (const v1::Shard& shard : set.shards()) {
    ranks.push_back({shard.rank(), shard.device()});
    tensors += shard.tensor_count();
    bytes += shard.size_bytes();
  }
  return {{"fingerprint", set.fingerprint()},
          {"generation", absl::StrCat(set.generation())},
          {"ranks", JoinRanks(ranks)},
          {"tensors", absl::StrCat(tensors)},
          {"bytes", absl::StrCat(bytes)}};
}

int RegistryTotals::CountLoads() const {
  int loads = 0;
  for (const auto state :
       {v1::WEIGHT_SET_STATE_ALLOCATING, v1::WEIGHT_SET_STATE_LOADING, v1::WEIGHT_SET_STATE_VERIFYING}) {
    if (const auto it = sets_by_state.find(state); it != sets_by_state.end()) loads += it->second;
  }
  return loads;
}

int RegistryTotals::CountResident() const {
  const auto it = sets_by_state.find(v1::WEIGHT_SET_STATE_RESIDENT);
  return it == sets_by_state.end() ? 0 : it->second;
}

WeightSetView Registry::View(const WeightSetRef& set) const {
  MutexLock lock(mutex_);
  return ViewLocked(*set);
}

WeightSetView Registry::ViewLocked(const WeightSetEntry& set) const {
  WeightSetView view;
  view.state = set.state_;
  view.generation = set.residency_.generation;
  view.resident_time = set.residency_.resident_time;
  view.done_bytes = set.done_bytes_;
  view.total_bytes = set.read_bytes_;
  view.failure = set.failure_;
  view.pins = set.pins_;
  const double seconds = std::chrono::duration<double>(options_.clock->SteadyNow() - set.granted_steady_).count();
  if (set.done_bytes_ > 0 && seconds > 0) {
    view.rate_bytes_per_second = static_cast<double>(set.done_bytes_) / seconds;
    view.seconds_left = static_cast<double>(set.read_bytes_ - set.done_bytes_) / view.rate_bytes_per_second;
  }
  return view;
}

v1::WeightSet Registry::Describe(const WeightSetRef& set) const {
  MutexLock lock(mutex_);
  return DescribeLocked(*set);
}

v1::WeightSet Registry::DescribeLocked(const WeightSetEntry& set) const {
  v1::WeightSet proto;
  proto.set_fingerprint(set.fingerprint().hash);
  proto.set_generation(set.residency_.generation);
  proto.set_state(set.state_);
  *proto.mutable_spec() = set.spec();
  *proto.mutable_environment() = set.environment();
  for (size_t i = 0; i < set.shards_.size(); ++i) {
    DescribeShard(*set.shards_[i], set.lease_counts_[i], set.quarantines_[i], proto.add_shards());
  }
  SetTimestamp(set.residency_.register_time, proto.mutable_register_time());
  if (set.residency_.resident_time != std::chrono::system_clock::time_point()) {
    SetTimestamp(set.residency_.resident_time, proto.mutable_resident_time());
  }
  if (set.adopt_time_ != std::chrono::system_clock::time_point()) {
    SetTimestamp(set.adopt_time_, proto.mutable_adopt_time());
  }
  proto.set_pinned(set.pins_.any());
  if (set.last_use_ > 0) SetTimestamp(set.last_use_time_, proto.mutable_last_use_time());
  for (std::string& alias : AliasesOf(set)) *proto.add_aliases() = std::move(alias);
  proto.set_load_seconds(set.residency_.load_seconds);
  proto.set_read_bytes(set.residency_.read_bytes);
  if (registry_internal::IsLoading(set.state_) && set.read_bytes_ > 0) {
    const WeightSetView view = ViewLocked(set);
    v1::LoadProgress& progress = *proto.mutable_progress();
    progress.set_done_bytes(view.done_bytes);
    progress.set_total_bytes(view.total_bytes);
    progress.set_rate_bytes_per_second(view.rate_bytes_per_second);
    if (view.seconds_left.has_value()) progress.set_seconds_left(*view.seconds_left);
  }
  if (!set.failure_.ok()) {
    proto.mutable_failure()->set_reason(GetErrorDetails(set.failure_).reason);
    proto.mutable_failure()->set_message(std::string(set.failure_.message()));
  }
  return proto;
}

std::vector<v1::WeightSet> Registry::List() const {
  MutexLock lock(mutex_);
  std::vector<v1::WeightSet> list;
  list.reserve(sets_.size());
  for (const WeightSetRef& set : sets_) list.push_back(DescribeLocked(*set));
  return list;
}

RegistryTotals Registry::Totals() const {
  MutexLock lock(mutex_);
  RegistryTotals totals;
  totals.reserved_by_device = reserved_by_device_;
  for (const auto& [device, bytes] : reserved_by_device_) totals.reserved_bytes += bytes;
  totals.lease_count = static_cast<int>(leases_.size());
  totals.draining = draining_;
  totals.alias_count = static_cast<int>(aliases_.size());
  for (const WeightSetRef& set : sets_) {
    ++totals.sets_by_state[set->state_];
    totals.pinned_sets += set->pins_.any() ? 1 : 0;
    totals.quarantined_shards += std::count_if(set->quarantines_.begin(), set->quarantines_.end(),
                                               [](const std::string& why) { return !why.empty(); });
    totals.resident_shards += static_cast<int64_t>(set->shards_.size());
    for (const auto& shard : set->shards_) {
      totals.resident_bytes += shard->size_bytes;
      totals.resident_tensors += shard->tensor_count;
      totals.publisher_writable_shards += MayBeWritten(*shard) ? 1 : 0;
    }
  }
  return totals;
}

}  // namespace weightbroker
