#include "server/broker/keeper_vault.h"

#include <utility>

#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "server/broker/adoption.h"
#include "server/broker/kept_group.h"
#include "server/broker/kept_records.h"

namespace weightbroker {
namespace {

// The keeper's own memory is to stay small, however many files a checkpoint has.
constexpr size_t kMaxInlineBytes = 4096;

}  // namespace

absl::Status KeeperVault::Keep(const ShardToKeep& kept) {
  std::vector<int> fds;
  for (const UniqueFd& fd : *kept.shard.slab_fds) fds.push_back(fd.get());
  fds.push_back(kept.shard.manifest->file().fd.get());
  if (kept.shard.exporter != nullptr) fds.push_back(kept.shard.exporter->control_fd());
  return Put(ShardKey(kept.set.fingerprint.hash, kept.shard.rank), MakeShardRecord(kept).SerializeAsString(), fds,
             kept.quarantine.empty() ? 1 : kQuarantineVersion);
}

absl::Status KeeperVault::Forget(const std::string& fingerprint, int32_t rank) {
  return client_->Drop(ShardKey(fingerprint, rank));
}

absl::Status KeeperVault::KeepLoad(const NewWeightSet& set, int32_t attempt) {
  return Put(KeptKey(kLoadKind, set.fingerprint.hash), MakeLoadRecord(set, attempt).SerializeAsString(), {});
}

absl::Status KeeperVault::ForgetLoad(const std::string& fingerprint) {
  return client_->Drop(KeptKey(kLoadKind, fingerprint));
}

absl::Status KeeperVault::KeepGeneration(const std::string& fingerprint, int64_t generation) {
  internal::v1::GenerationRecord record;
  record.set_generation(generation);
  return Put(KeptKey(kGenerationKind, fingerprint), record.SerializeAsString(), {});
}

absl::Status KeeperVault::ForgetGeneration(const std::string& fingerprint) {
  return client_->Drop(KeptKey(kGenerationKind, fingerprint));
}

absl::Status KeeperVault::KeepAlias(const KeptAlias& alias) {
  return Put(KeptKey(kAliasKind, alias.name), MakeAliasRecord(alias).SerializeAsString(), {});
}

absl::Status KeeperVault::ForgetAlias(const std::string& name) { return client_->Drop(KeptKey(kAliasKind, name)); }

absl::Status KeeperVault::KeepGroup(const KeptGroup& group) {
  return Put(KeptKey(kGroupKind, group.name), MakeGroupRecord(group).SerializeAsString(), {group.page->front().get()});
}

absl::Status KeeperVault::ForgetGroup(const std::string& name) { return client_->Drop(KeptKey(kGroupKind, name)); }

absl::Status KeeperVault::Put(const std::string& key, const std::string& record, const std::vector<int>& fds,
                              int32_t version) {
  ASSIGN_OR_RETURN(const EncodedRecord encoded, EncodeRecord(record, kMaxInlineBytes, version));
  std::vector<int> all;
  if (encoded.memfd.valid()) all.push_back(encoded.memfd.get());
  all.insert(all.end(), fds.begin(), fds.end());
  return client_->Put(key, encoded.value, all);
}

Adoption KeeperVault::TakeAdoption() {
  KeeperInheritance inherited;
  {
    MutexLock lock(mutex_);
    inherited = std::exchange(inherited_, {});
  }
  // A keeper that has gone is noticed elsewhere.
  CheckedEntries checked = CheckEntries(
      std::move(inherited.entries), [this](const std::string& key) { client_->TakingUp(key).IgnoreError(); },
      check_gpu_fd_);
  client_->TakingUp("").IgnoreError();
  checked.adoption.dropped_entries += inherited.dropped_entries;
  for (const RefusedEntry& refused : checked.refused) ForgetRefused(refused.entry.key, refused.cause);
  for (const std::string& key : checked.finished_load_keys) client_->Drop(key).IgnoreError();
  MutexLock lock(mutex_);
  for (const Adoption::Set& set : checked.adoption.sets) {
    const std::string& fingerprint = set.request.fingerprint.hash;
    keys_[fingerprint] = ShardKey(fingerprint, 0);  // without it the other ranks are dropped, too
  }
  for (const Adoption::Load& load : checked.adoption.loads) {
    const std::string& fingerprint = load.request.fingerprint.hash;
    keys_[fingerprint] = KeptKey(kLoadKind, fingerprint);
  }
  return std::move(checked.adoption);
}

void KeeperVault::TakingUp(const std::string& fingerprint) {
  std::string key;
  {
    MutexLock lock(mutex_);
    const auto it = keys_.find(fingerprint);
    if (it != keys_.end()) key = it->second;
  }
  client_->TakingUp(key).IgnoreError();
}

void KeeperVault::ForgetRefused(const std::string& key, const absl::Status& cause) {
  const absl::Status dropped = client_->Drop(key);
  Log(LogLevel::kError, "adoption.refused",
      {{"key", key},
       {"reason", GetErrorDetails(cause).reason},
       {"message", std::string(cause.message())},
       {"dropped", dropped.ok() ? "true" : std::string(dropped.message())}});
}

}  // namespace weightbroker
