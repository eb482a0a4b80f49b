// The vault that outlives the broker: everything is kept by the keeper, as entries of its store.
//
//   KeeperInheritance inheritance = (*keeper)->TakeInheritance();
//   KeeperVault vault(keeper->get(), std::move(inheritance));
//
// An entry is one record of kept.proto. A shard's descriptors are its slabs', in their order (none for CUDA_IPC), the
// manifest's, and for CUDA_IPC the control socket of its exporter, which ends when nobody holds that. An engine group's
// is its page's. A record that
// would take much of the keeper's own memory goes into a memfd, which is then the entry's first descriptor.
//
// Thread-safe.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "common/base/mutex.h"
#include "common/keeper/client.h"
#include "server/broker/vault.h"

namespace weightbroker {

class KeeperVault : public ShardVault {
 public:
  // `client` must outlive the vault. `inherited` is what the broker before this one has left.
  KeeperVault(KeeperClient* client, KeeperInheritance inherited, GpuFdCheck check_gpu_fd = CheckGpuMemoryFd)
      : client_(client), check_gpu_fd_(check_gpu_fd), inherited_(std::move(inherited)) {}

  absl::Status Keep(const ShardToKeep& shard) override;
  absl::Status Forget(const std::string& fingerprint, int32_t rank) override;
  absl::Status KeepLoad(const NewWeightSet& set, int32_t attempt) override;
  absl::Status ForgetLoad(const std::string& fingerprint) override;
  absl::Status KeepGeneration(const std::string& fingerprint, int64_t generation) override;
  absl::Status ForgetGeneration(const std::string& fingerprint) override;
  absl::Status KeepAlias(const KeptAlias& alias) override;
  absl::Status ForgetAlias(const std::string& name) override;
  absl::Status KeepGroup(const KeptGroup& group) override;
  absl::Status ForgetGroup(const std::string& name) override;

  // Forgets what does not prove to be right, with one log line each.
  Adoption TakeAdoption() override;
  void TakingUp(const std::string& fingerprint) override;

  bool outlives_broker() const override { return true; }

 private:
  absl::Status Put(const std::string& key, const std::string& record, const std::vector<int>& fds, int32_t version = 1);
  void ForgetRefused(const std::string& key, const absl::Status& cause);

  KeeperClient* const client_;
  const GpuFdCheck check_gpu_fd_;

  Mutex mutex_;
  KeeperInheritance inherited_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::string> keys_ ABSL_GUARDED_BY(mutex_);  // of what is to be adopted, by fingerprint
};

}  // namespace weightbroker
