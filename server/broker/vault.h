// Where the broker writes down what the next broker must know, behind an interface: a set is RESIDENT only once the
// vault has all of its shards, so that no broker's end can lose one that an engine has seen.
//
//   RETURN_IF_ERROR(vault.KeepLoad(set, 1));                   // the next broker would start this load again
//   RETURN_IF_ERROR(vault.Keep({set, residency, shard, 1}));   // returns when it is safe
//   RETURN_IF_ERROR(vault.ForgetLoad(set.fingerprint.hash));
//
// Thread-safe. Calls block until they are acknowledged: make none while holding a lock. Those that return a status fail
// with KEEPER_REFUSED if the vault is at a limit, SERVICE_UNAVAILABLE if it has gone, and DEADLINE_EXCEEDED if it is
// not known whether it has done it.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/base/unique_fd.h"
#include "server/broker/shard.h"
#include "server/broker/weight_set.h"

namespace weightbroker {

// What an alias names.
struct KeptAlias {
  std::string name;
  std::string fingerprint;
  std::string previous_fingerprint = {};  // empty if there was none
  std::chrono::system_clock::time_point move_time = {};
};

// An engine group, whose page's descriptor outlives brokers.
struct KeptGroup {
  std::string name;
  std::string fingerprint;
  uid_t owner_uid = 0;
  std::optional<gid_t> allowed_gid;
  std::chrono::nanoseconds heartbeat_timeout{0};
  std::chrono::system_clock::time_point create_time;
  std::shared_ptr<const std::vector<UniqueFd>> page;  // one descriptor, for reading and writing
};

// What the broker before this one had written down, as far as it proved to be right.
struct Adoption {
  struct Set {
    NewWeightSet request;
    std::vector<std::shared_ptr<const Shard>> shards;  // by rank, every one of them
    Residency residency;
    std::map<int32_t, std::string> quarantines = {};  // by rank, of shards in quarantine: why
  };
  struct Load {
    NewWeightSet request;
    int32_t attempt = 0;  // how many brokers have begun it
  };

  std::vector<Set> sets;                       // oldest first, by when they became resident; none of them twice
  std::vector<Load> loads;                     // of fingerprints that are not among the sets
  std::vector<KeptAlias> aliases;              // by name; their sets may be missing
  std::map<std::string, int64_t> generations;  // by fingerprint; those of the sets, too
  std::vector<KeptGroup> groups;               // by name
  int dropped_entries = 0;                     // which did not prove to be right; they are forgotten and logged
};

// The empty string. Never deleted.
const std::string& NotInQuarantine();

// One shard with all that it is part of.
struct ShardToKeep {
  const NewWeightSet& set;
  const Residency& residency;
  const Shard& shard;
  int32_t rank_count;
  const std::string& quarantine = NotInQuarantine();  // why it is; empty if it is not
};

class ShardVault {
 public:
  virtual ~ShardVault() = default;

  // Keeps a shard, with duplicates of its descriptors, in place of what was kept of that fingerprint and rank.
  virtual absl::Status Keep(const ShardToKeep& shard) = 0;
  // Ok if there is none. Forget before the descriptors here are closed: whoever closes the last one waits for the
  // kernel to free the memory.
  virtual absl::Status Forget(const std::string& fingerprint, int32_t rank) = 0;

  // Keeps a load that `attempt` brokers have begun, this one included.
  virtual absl::Status KeepLoad(const NewWeightSet& set, int32_t attempt) = 0;
  virtual absl::Status ForgetLoad(const std::string& fingerprint) = 0;

  virtual absl::Status KeepGeneration(const std::string& fingerprint, int64_t generation) = 0;
  virtual absl::Status ForgetGeneration(const std::string& fingerprint) = 0;

  // Keeps what an alias names, in place of what was kept of that name.
  virtual absl::Status KeepAlias(const KeptAlias& alias) = 0;
  virtual absl::Status ForgetAlias(const std::string& name) = 0;

  virtual absl::Status KeepGroup(const KeptGroup& /*group*/) { return absl::OkStatus(); }
  virtual absl::Status ForgetGroup(const std::string& /*name*/) { return absl::OkStatus(); }

  // The first call gets it, later ones nothing.
  virtual Adoption TakeAdoption() = 0;

  // Says which of the sets and loads of the adoption is about to be taken up; empty: none. One over which broker after
  // broker ends is dropped.
  virtual void TakingUp(const std::string& /*fingerprint*/) {}

  // Whether what is kept outlives this process.
  virtual bool outlives_broker() const = 0;
};

// Keeps nothing, and says that all is well: for a broker that runs alone. Never deleted.
ShardVault& NoVault();

}  // namespace weightbroker
