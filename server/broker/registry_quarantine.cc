// Shards that must not be used any more: what was found of them is kept by the vault, too, so that no later broker
// serves them again. It is never asked under the lock.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "server/broker/registry.h"
#include "server/broker/registry_internal.h"

namespace weightbroker {
namespace registry_internal {

absl::Status QuarantinedError(const WeightSetEntry& set, int32_t rank, const std::string& why) {
  return MakeError(Reason::kQuarantined,
                   absl::StrCat("rank ", rank, " of weight set ", set.fingerprint().hash, " is in quarantine: ", why,
                                "; stop the engines that use it, unregister the set and register it again"),
                   {{"fingerprint", set.fingerprint().hash}, {"rank", absl::StrCat(rank)}, {"cause", why}});
}

}  // namespace registry_internal

using namespace registry_internal;  // NOLINT(google-build-using-namespace): the registry's own

Registry::QuarantineResult Registry::Quarantine(const WeightSetRef& set, int32_t rank, const std::string& why) {
  Callbacks callbacks;
  std::shared_ptr<const Shard> shard;
  Residency residency;
  int32_t rank_count = 0;
  NewWeightSet request = set->request_;
  bool is_forgotten = false;
  {
    MutexLock lock(mutex_);
    // What a release has the vault forget must not be written down again after it.
    while (set->vault_is_busy_) vault_done_.Wait(mutex_);
    const auto found = std::find_if(set->shards_.begin(), set->shards_.end(),
                                    [rank](const auto& candidate) { return candidate->rank == rank; });
    if (found == set->shards_.end()) return {};
    const auto index = static_cast<size_t>(found - set->shards_.begin());
    if (!set->quarantines_[index].empty()) return {};
    set->quarantines_[index] = why;
    shard = *found;
    residency = set->residency_;
    rank_count = static_cast<int32_t>(set->shards_.size());
    request.pins = set->pins_;
    is_forgotten = set->vault_has_forgotten_;
    set->vault_is_busy_ = true;
    for (auto& [id, record] : leases_) {
      if (record.set != set || record.shard_index != index || !record.on_quarantined) continue;
      callbacks.emplace_back([tell = std::exchange(record.on_quarantined, nullptr), why] { tell(why); });
    }
    CollectObservers(*set, &callbacks);
  }
  Call(std::exchange(callbacks, {}));
  // What a release has had the vault forget, of a set whose leases go on, stays forgotten.
  const absl::Status kept =
      is_forgotten ? absl::OkStatus() : options_.vault->Keep({request, residency, *shard, rank_count, why});
  MutexLock lock(mutex_);
  set->vault_is_busy_ = false;
  vault_done_.NotifyAll();
  return {.is_new = true, .kept = kept};
}

absl::Status Registry::CheckNotQuarantined(const WeightSetRef& set) const {
  MutexLock lock(mutex_);
  for (size_t i = 0; i < set->quarantines_.size(); ++i) {
    if (!set->quarantines_[i].empty()) return QuarantinedError(*set, set->shards_[i]->rank, set->quarantines_[i]);
  }
  return absl::OkStatus();
}

std::vector<Registry::PlacedShard> Registry::HealthyShards(const WeightSetRef& of_set,
                                                           const std::string& device) const {
  std::vector<PlacedShard> shards;
  MutexLock lock(mutex_);
  for (const WeightSetRef& set : sets_) {
    if ((of_set != nullptr && set != of_set) || set->state_ != v1::WEIGHT_SET_STATE_RESIDENT) continue;
    for (size_t i = 0; i < set->shards_.size(); ++i) {
      const bool is_wanted = device.empty() || set->shards_[i]->device == device;
      if (is_wanted && set->quarantines_[i].empty()) shards.push_back({set, set->shards_[i]});
    }
  }
  return shards;
}

}  // namespace weightbroker
