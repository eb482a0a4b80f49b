#include "server/broker/identity_cache.h"

#include <algorithm>
#include <utility>

#include "common/base/status_macros.h"

namespace weightbroker {

absl::StatusOr<std::shared_ptr<const CheckpointIdentity>> IdentityCache::Get(const std::string& folder) {
  const std::shared_ptr<Entry> entry = FindOrAdd(folder);
  MutexLock lock(entry->mutex);
  ASSIGN_OR_RETURN(const FileStat folder_stat, stats_.Stat(folder));
  if (IsCurrent(*entry, folder_stat)) return entry->identity;
  entry->identity = nullptr;
  ASSIGN_OR_RETURN(CheckpointIdentity identity, ReadCheckpointIdentity(reader_, folder));
  identity.folder_stat = folder_stat;  // of before the files were read
  entry->identity = std::make_shared<const CheckpointIdentity>(std::move(identity));
  return entry->identity;
}

void IdentityCache::Seed(std::shared_ptr<const CheckpointIdentity> identity) {
  const std::shared_ptr<Entry> entry = FindOrAdd(identity->folder);
  MutexLock lock(entry->mutex);
  entry->identity = std::move(identity);
}

bool IdentityCache::IsCurrent(const Entry& entry, const FileStat& folder_stat) const {
  return entry.identity != nullptr && entry.identity->folder_stat == folder_stat &&
         CheckUnchanged(stats_, *entry.identity).ok();
}

std::shared_ptr<IdentityCache::Entry> IdentityCache::FindOrAdd(const std::string& folder) {
  MutexLock lock(mutex_);
  std::shared_ptr<Entry>& entry = entries_[folder];
  if (entry == nullptr) entry = std::make_shared<Entry>();
  entry->last_use = ++use_count_;
  const std::shared_ptr<Entry> found = entry;
  if (entries_.size() > max_folders_) {
    entries_.erase(std::min_element(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) {
      return a.second->last_use < b.second->last_use;
    }));
  }
  return found;
}

}  // namespace weightbroker
