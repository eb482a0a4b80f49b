// Reads what a broker had written down with the keeper, and believes none of it: digests, sizes, seals and fingerprints
// are checked before a shard is served again.
//
//   CheckedEntries checked = CheckEntries(std::move(inheritance.entries));
//   for (const RefusedEntry& refused : checked.refused) ...             // forget it, and say why
//   for (Adoption::Set& set : checked.adoption.sets) ...                // whole, and as it was
//
// Opens no file. Thread-safe: a pure function but for reading memfds.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/keeper/client.h"
#include "server/broker/vault.h"

namespace weightbroker {

// The highest version of records that this broker reads: see KeptValue in kept.proto.
inline constexpr int32_t kKeptVersion = 2;
// Of a record that an older broker would misunderstand: it would serve a shard in quarantine. All others are of 1.
inline constexpr int32_t kQuarantineVersion = 2;

// Keys are <kind>/<fingerprint>, and a shard's has its rank behind that. For engine groups see kept_group.h.
inline constexpr char kShardKind[] = "shard";
inline constexpr char kLoadKind[] = "load";
inline constexpr char kGenerationKind[] = "generation";
// Its key has the alias's name in place of a fingerprint.
inline constexpr char kAliasKind[] = "alias";
std::string KeptKey(std::string_view kind, const std::string& fingerprint);
std::string ShardKey(const std::string& fingerprint, int32_t rank);

// An entry's value for a record. If the record is larger than `max_inline_bytes`, it goes into `memfd`, which must
// become the entry's first descriptor.
struct EncodedRecord {
  std::string value;
  UniqueFd memfd;  // invalid if the value has it all
};
absl::StatusOr<EncodedRecord> EncodeRecord(const std::string& record, size_t max_inline_bytes, int32_t version = 1);

// One that did not prove to be right, its descriptors still open: forget it before they are closed.
struct RefusedEntry {
  KeeperEntry entry;
  absl::Status cause;
  std::shared_ptr<const Shard> shard = nullptr;  // has the descriptors, if the entry itself proved to be right
};

struct CheckedEntries {
  Adoption adoption;
  std::vector<RefusedEntry> refused;
  // Of loads that had ended, but for being forgotten.
  std::vector<std::string> finished_load_keys;
};

// A shard of a set of which another rank is missing or refused is refused, too: a set is served whole or not at all.
// `taking_up` is called with the key of each entry before anything is made of it.
CheckedEntries CheckEntries(std::vector<KeeperEntry> entries,
                            const std::function<void(const std::string& key)>& taking_up = nullptr,
                            GpuFdCheck check_gpu_fd = CheckGpuMemoryFd);

}  // namespace weightbroker
