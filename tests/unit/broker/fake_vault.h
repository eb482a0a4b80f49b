// A vault in memory that a test can watch and have refuse.
//
//   FakeVault vault;
//   vault.OnCall([](const std::string& call) { return call == "Keep 1" ? Refused() : absl::OkStatus(); });
//   ...
//   EXPECT_THAT(vault.calls(), ElementsAre("KeepGeneration 1", "Keep 0", "Keep 1", "Forget 0", "Forget 1"));
//
// Thread-safe.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/mutex.h"
#include "server/broker/vault.h"

namespace weightbroker::testing {

class FakeVault : public ShardVault {
 public:
  // Asked at each call, which is written down as its name and its number: the rank, the attempt or the generation.
  void OnCall(std::function<absl::Status(const std::string& call)> on_call) {
    MutexLock lock(mutex_);
    on_call_ = std::move(on_call);
  }
  void SetAdoption(Adoption adoption) {
    MutexLock lock(mutex_);
    adoption_ = std::move(adoption);
  }
  std::vector<std::string> calls() {
    MutexLock lock(mutex_);
    return calls_;
  }
  // What the last Keep was given.
  Residency last_residency() {
    MutexLock lock(mutex_);
    return last_residency_;
  }

  absl::Status Keep(const ShardToKeep& kept) override {
    {
      MutexLock lock(mutex_);
      last_residency_ = kept.residency;
    }
    return Call(absl::StrCat("Keep ", kept.shard.rank));
  }
  absl::Status Forget(const std::string&, int32_t rank) override { return Call(absl::StrCat("Forget ", rank)); }
  absl::Status KeepLoad(const NewWeightSet&, int32_t attempt) override {
    return Call(absl::StrCat("KeepLoad ", attempt));
  }
  absl::Status ForgetLoad(const std::string&) override { return Call("ForgetLoad"); }
  absl::Status KeepGeneration(const std::string&, int64_t generation) override {
    return Call(absl::StrCat("KeepGeneration ", generation));
  }
  absl::Status ForgetGeneration(const std::string& fingerprint) override {
    return Call(absl::StrCat("ForgetGeneration ", fingerprint.substr(0, 2)));
  }
  absl::Status KeepAlias(const KeptAlias& alias) override {
    return Call(absl::StrCat("KeepAlias ", alias.name, " ", alias.fingerprint.substr(0, 2)));
  }
  absl::Status ForgetAlias(const std::string& name) override { return Call(absl::StrCat("ForgetAlias ", name)); }
  Adoption TakeAdoption() override {
    MutexLock lock(mutex_);
    return std::exchange(adoption_, {});
  }
  bool outlives_broker() const override { return true; }

 private:
  absl::Status Call(const std::string& call) {
    std::function<absl::Status(const std::string&)> on_call;
    {
      MutexLock lock(mutex_);
      calls_.push_back(call);
      on_call = on_call_;
    }
    return on_call ? on_call(call) : absl::OkStatus();
  }

  Mutex mutex_;
  std::function<absl::Status(const std::string&)> on_call_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> calls_ ABSL_GUARDED_BY(mutex_);
  Residency last_residency_ ABSL_GUARDED_BY(mutex_);
  Adoption adoption_ ABSL_GUARDED_BY(mutex_);
};

// Refuses `call`, as a keeper that is at a limit would.
inline std::function<absl::Status(const std::string&)> Refuses(const std::string& call) {
  return [call](const std::string& made) {
    return made == call ? MakeError(Reason::kKeeperRefused, "the keeper refused: no room") : absl::OkStatus();
  };
}

}  // namespace weightbroker::testing
