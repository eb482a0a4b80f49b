// A vault that keeps what it is told in memory, as a keeper does, and hands it to the next registry.
//
//   RememberingVault vault;
//   vault.FailNext("KeepAlias");                  // the next such call is refused
//   Adoption left = vault.TakeAdoption();          // all that is kept, any number of times
//
// Not thread-safe.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "common/base/error.h"
#include "server/broker/vault.h"

namespace weightbroker::testing {

class RememberingVault : public ShardVault {
 public:
  struct KeptSet {
    NewWeightSet request;
    Residency residency;
    std::map<int32_t, std::shared_ptr<const Shard>> shards;  // by rank
  };

  void FailNext(std::string call) { failing_ = std::move(call); }

  const std::map<std::string, KeptSet>& sets() const { return sets_; }
  const std::map<std::string, KeptAlias>& aliases() const { return aliases_; }

  absl::Status Keep(const ShardToKeep& kept) override {
    if (Fails("Keep")) return Refused();
    KeptSet& set = sets_[kept.set.fingerprint.hash];
    set.request = kept.set;
    set.residency = kept.residency;
    set.shards[kept.shard.rank] = std::make_shared<const Shard>(kept.shard);  // with its own hold on the memory
    return absl::OkStatus();
  }
  absl::Status Forget(const std::string& fingerprint, int32_t rank) override {
    const auto found = sets_.find(fingerprint);
    if (found == sets_.end()) return absl::OkStatus();
    found->second.shards.erase(rank);
    if (found->second.shards.empty()) sets_.erase(found);
    return absl::OkStatus();
  }
  absl::Status KeepLoad(const NewWeightSet&, int32_t) override { return absl::OkStatus(); }
  absl::Status ForgetLoad(const std::string&) override { return absl::OkStatus(); }
  absl::Status KeepGeneration(const std::string& fingerprint, int64_t generation) override {
    generations_[fingerprint] = generation;
    return absl::OkStatus();
  }
  absl::Status ForgetGeneration(const std::string& fingerprint) override {
    generations_.erase(fingerprint);
    return absl::OkStatus();
  }
  absl::Status KeepAlias(const KeptAlias& alias) override {
    if (Fails("KeepAlias")) return Refused();
    aliases_[alias.name] = alias;
    return absl::OkStatus();
  }
  absl::Status ForgetAlias(const std::string& name) override {
    aliases_.erase(name);
    return absl::OkStatus();
  }

  Adoption TakeAdoption() override {
    Adoption adoption;
    for (const auto& [fingerprint, kept] : sets_) {
      Adoption::Set& set = adoption.sets.emplace_back(Adoption::Set{kept.request, {}, kept.residency});
      for (const auto& [rank, shard] : kept.shards) set.shards.push_back(shard);
    }
    for (const auto& [name, alias] : aliases_) adoption.aliases.push_back(alias);
    adoption.generations = generations_;
    return adoption;
  }
  bool outlives_broker() const override { return true; }

 private:
  bool Fails(const std::string& call) {
    if (failing_ != call) return false;
    failing_.clear();
    return true;
  }
  static absl::Status Refused() { return MakeError(Reason::kKeeperRefused, "the keeper refused: no room"); }

  std::string failing_;
  std::map<std::string, KeptSet> sets_;  // by fingerprint
  std::map<std::string, KeptAlias> aliases_;
  std::map<std::string, int64_t> generations_;
};

}  // namespace weightbroker::testing
