#include "server/broker/adoption.h"

#include <algorithm>
#include <map>
#include <span>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/base/alias_name.h"
#include "common/base/error.h"
#include "common/base/read_fd.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"
#include "common/identity/sha256.h"
#include "common/memory/host_slab.h"
#include "common/plan/plan.h"
#include "server/broker/kept_group.h"
#include "server/broker/kept_records.h"
#include "server/broker/names.h"
#include "weightbroker/internal/v1/kept.pb.h"

namespace weightbroker {
namespace {

constexpr int64_t kMaxRecordBytes = int64_t{256} << 20;

absl::Status Distrust(const std::string& what) { return MakeError(Reason::kProtocolError, what); }

struct Key {
  std::string kind;
  std::string fingerprint;  // of a group or an alias: its name
  int32_t rank = 0;         // of a shard
};

absl::StatusOr<Key> ParseKey(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, '/');
  Key key;
  if (parts.size() >= 2) {
    key.kind = parts[0];
    key.fingerprint = parts[1];
  }
  const bool is_shard = key.kind == kShardKind && parts.size() == 3 && absl::SimpleAtoi(parts[2], &key.rank) &&
                        text == ShardKey(key.fingerprint, key.rank);
  const bool is_other =
      (key.kind == kLoadKind || key.kind == kGenerationKind || key.kind == kGroupKind) && parts.size() == 2;
  const bool is_alias = key.kind == kAliasKind && parts.size() == 2 && IsAliasName(key.fingerprint);
  if (is_shard || is_other || is_alias) return key;
  return Distrust("its key is of no kind that this broker knows");
}

absl::StatusOr<std::string> ReadSealedRecord(const internal::v1::SealedRecord& sealed, std::vector<UniqueFd>* fds) {
  if (fds->empty()) return Distrust("its record is said to be in a descriptor, but there is none");
  const UniqueFd fd = std::move(fds->front());
  fds->erase(fds->begin());
  if (sealed.size_bytes() < 0 || sealed.size_bytes() > kMaxRecordBytes) {
    return Distrust(absl::StrCat("its record is said to have ", sealed.size_bytes(), " bytes; at most ",
                                 kMaxRecordBytes, " are taken"));
  }
  const auto size_bytes = static_cast<size_t>(sealed.size_bytes());
  ASSIGN_OR_RETURN(std::string record, ReadFd(fd.get(), size_bytes, "reading a record from its memfd"));
  if (record.size() < size_bytes) {
    return Distrust(absl::StrCat("its record ends after ", record.size(), " of ", size_bytes, " bytes"));
  }
  if (Sha256Bytes(record) != sealed.sha256()) return Distrust("its record has another SHA-256 than is said of it");
  return record;
}

// Takes the record's own descriptor, if it has one, from the front of `fds`.
template <typename Record>
absl::StatusOr<Record> DecodeRecord(const std::string& value, std::vector<UniqueFd>* fds) {
  internal::v1::KeptValue kept;
  if (!kept.ParseFromString(value)) return Distrust("its value is not a KeptValue");
  if (kept.version() < 1 || kept.version() > kKeptVersion) {
    return Distrust(absl::StrCat("its record has version ", kept.version(), "; this broker reads 1 to ", kKeptVersion));
  }
  std::string bytes;
  if (kept.has_record()) {
    bytes = std::move(*kept.mutable_record());
  } else if (kept.has_sealed_record()) {
    ASSIGN_OR_RETURN(bytes, ReadSealedRecord(kept.sealed_record(), fds));
  } else {
    return Distrust("it has no record");
  }
  Record record;
  if (!record.ParseFromString(bytes)) {
    return Distrust(absl::StrCat("its record is not a ", std::string(Record::descriptor()->name())));
  }
  return record;
}

absl::Status CheckFingerprint(const Key& key, const internal::v1::WeightSetRecord& record) {
  if (record.fingerprint() == key.fingerprint) return absl::OkStatus();
  return Distrust(absl::StrCat("its record is of fingerprint ", record.fingerprint(), ", not of the one in its key"));
}

// What one entry says of a set: the whole of it and one shard.
struct KeptShard {
  NewWeightSet set;
  Residency residency;
  std::shared_ptr<Shard> shard;
  std::string quarantine;  // why it is in quarantine; empty if it is not
};

// Whether the shard is where its set's placement says, and the placement has as many ranks as the record says.
absl::Status CheckPlace(const internal::v1::ShardRecord& record, const Placement& placement) {
  const bool is_placed = std::find(placement.ranks.begin(), placement.ranks.end(),
                                   RankPlacement{record.rank(), record.device()}) != placement.ranks.end();
  if (is_placed && static_cast<size_t>(record.rank_count()) == placement.ranks.size()) return absl::OkStatus();
  return Distrust(absl::StrCat("its record is of rank ", record.rank(), " on ", record.device(), ", one of ",
                               record.rank_count(), " held here, and its set's ranks here are ",
                               JoinRanks(placement.ranks)));
}

absl::StatusOr<KeptShard> ReadShard(const Key& key, const std::string& value, GpuFdCheck check_gpu_fd,
                                    std::vector<UniqueFd>* fds) {
  ASSIGN_OR_RETURN(const auto record, DecodeRecord<internal::v1::ShardRecord>(value, fds));
  RETURN_IF_ERROR(CheckFingerprint(key, record.weight_set()));
  if (record.rank() != key.rank) {
    return Distrust(absl::StrCat("its record is of rank ", record.rank(), ", and its key of rank ", key.rank));
  }
  if (record.generation() < 1 || record.tensor_count() < 0 || record.read_bytes() < 0) {
    return Distrust("its record has a generation under 1, or less than no tensors or bytes");
  }
  const bool has_exporter = record.handle_kind() == v1::HANDLE_KIND_CUDA_IPC;
  const size_t slab_fds = SlabFdCount(record.handle_kind(), static_cast<size_t>(record.slabs_size()));
  if (fds->size() != slab_fds + 1 + (has_exporter ? 1 : 0)) {
    return Distrust(absl::StrCat("it has ", fds->size(), " descriptors for ", record.slabs_size(),
                                 " slabs and a manifest, as ", HandleKindName(record.handle_kind())));
  }
  KeptShard kept;
  ASSIGN_OR_RETURN(kept.set, ReadWeightSet(record.weight_set()));
  RETURN_IF_ERROR(CheckPlace(record, kept.set.placement));
  kept.residency = ReadResidency(record);
  kept.quarantine = record.quarantine();
  kept.shard = std::make_shared<Shard>();
  kept.shard->rank = record.rank();
  kept.shard->device = record.device();
  kept.shard->handle_kind = record.handle_kind();
  kept.shard->tensor_count = record.tensor_count();
  if (has_exporter) {
    kept.shard->exporter = std::make_shared<const Exporter>(std::move(fds->back()));
    fds->pop_back();
  }
  if (record.has_publisher()) {
    kept.shard->publisher = std::make_shared<const PublisherProcess>(PublisherProcess::Remember(
        static_cast<pid_t>(record.publisher().process_id()), record.publisher().start_ticks()));
  }
  ManifestFile manifest{std::move(fds->back()), record.manifest_bytes(), record.manifest_sha256()};
  fds->pop_back();
  ASSIGN_OR_RETURN(kept.shard->manifest, Manifest::FromVault(std::move(manifest)));
  RETURN_IF_ERROR(TakeSlabs({record.slabs().begin(), record.slabs().end()}, fds, check_gpu_fd, kept.shard.get()));
  return kept;
}

// Whether every rank that is to be here is, and all are of one registration.
bool IsWhole(const std::map<int32_t, KeptShard>& shards) {
  const KeptShard& first = shards.begin()->second;
  return shards.size() == first.set.placement.ranks.size() &&
         std::all_of(shards.begin(), shards.end(), [&](const auto& shard) {
           return shard.second.set.placement.ranks == first.set.placement.ranks &&
                  shard.second.residency.generation == first.residency.generation;
         });
}

class Checker {
 public:
  explicit Checker(GpuFdCheck check_gpu_fd) : check_gpu_fd_(check_gpu_fd) {}

  CheckedEntries Check(std::vector<KeeperEntry> entries,
                       const std::function<void(const std::string& key)>& taking_up) && {
    for (KeeperEntry& entry : entries) {
      if (taking_up) taking_up(entry.key);
      CheckEntry(std::move(entry));
    }
    for (auto& [fingerprint, shards] : shards_) AddSet(fingerprint, std::move(shards));
    std::stable_sort(checked_.adoption.sets.begin(), checked_.adoption.sets.end(), [](const auto& a, const auto& b) {
      return a.residency.resident_time < b.residency.resident_time;
    });
    for (auto& [fingerprint, load] : loads_) AddLoad(fingerprint, std::move(load));
    checked_.adoption.dropped_entries = static_cast<int>(checked_.refused.size());
    return std::move(checked_);
  }

 private:
  void CheckEntry(KeeperEntry entry) {
    const absl::Status read = ReadEntry(entry.key, entry.value, &entry.fds);
    if (!read.ok()) checked_.refused.push_back({std::move(entry), read});
  }

  absl::Status ReadEntry(const std::string& text, const std::string& value, std::vector<UniqueFd>* fds) {
    ASSIGN_OR_RETURN(const Key key, ParseKey(text));
    if (key.kind == kShardKind) return AddShard(key, value, fds);
    if (key.kind == kLoadKind) return ReadLoad(key, value, fds);
    if (key.kind == kAliasKind) return ReadAlias(key, value, fds);
    if (key.kind == kGroupKind) return ReadGroup(key, value, fds);
    ASSIGN_OR_RETURN(const auto record, DecodeRecord<internal::v1::GenerationRecord>(value, fds));
    if (record.generation() < 1) return Distrust(absl::StrCat("its generation is ", record.generation()));
    NoteGeneration(key.fingerprint, record.generation());
    return absl::OkStatus();
  }

  absl::Status AddShard(const Key& key, const std::string& value, std::vector<UniqueFd>* fds) {
    ASSIGN_OR_RETURN(KeptShard shard, ReadShard(key, value, check_gpu_fd_, fds));
    NoteGeneration(key.fingerprint, shard.residency.generation);
    shards_[key.fingerprint].emplace(key.rank, std::move(shard));
    return absl::OkStatus();
  }

  absl::Status ReadGroup(const Key& key, const std::string& value, std::vector<UniqueFd>* fds) {
    ASSIGN_OR_RETURN(const auto record, DecodeRecord<internal::v1::GroupRecord>(value, fds));
    ASSIGN_OR_RETURN(KeptGroup group, ReadGroupRecord(key.fingerprint, record, fds));
    checked_.adoption.groups.push_back(std::move(group));
    return absl::OkStatus();
  }

  absl::Status ReadLoad(const Key& key, const std::string& value, std::vector<UniqueFd>* fds) {
    ASSIGN_OR_RETURN(const auto record, DecodeRecord<internal::v1::LoadRecord>(value, fds));
    RETURN_IF_ERROR(CheckFingerprint(key, record.weight_set()));
    ASSIGN_OR_RETURN(NewWeightSet set, ReadWeightSet(record.weight_set()));
    ASSIGN_OR_RETURN(set.spec, CompleteSpec(set.spec));  // a loader knows fields that an older broker did not
    loads_[key.fingerprint] = {std::move(set), record.attempt()};
    return absl::OkStatus();
  }

  absl::Status ReadAlias(const Key& key, const std::string& value, std::vector<UniqueFd>* fds) {
    ASSIGN_OR_RETURN(const auto record, DecodeRecord<internal::v1::AliasRecord>(value, fds));
    checked_.adoption.aliases.push_back(ReadAliasRecord(key.fingerprint, record));
    return absl::OkStatus();
  }

  void NoteGeneration(const std::string& fingerprint, int64_t generation) {
    int64_t& last = checked_.adoption.generations[fingerprint];
    last = std::max(last, generation);
  }

  void AddSet(const std::string& fingerprint, std::map<int32_t, KeptShard> shards) {
    if (!IsWhole(shards)) return RefuseAll(fingerprint, std::move(shards));
    KeptShard& first = shards.begin()->second;
    Adoption::Set set{std::move(first.set), {}, first.residency};
    for (auto& [rank, shard] : shards) {
      if (!shard.quarantine.empty()) set.quarantines[rank] = shard.quarantine;
      set.shards.push_back(std::move(shard.shard));
    }
    checked_.adoption.sets.push_back(std::move(set));
  }

  // With the shards in place of their descriptors: they are closed together.
  void RefuseAll(const std::string& fingerprint, std::map<int32_t, KeptShard> shards) {
    std::vector<RankPlacement> found;
    for (const auto& [rank, shard] : shards) found.push_back({rank, kHostDevice});
    const absl::Status cause =
        Distrust(absl::StrCat("of its set's ranks here, ", JoinRanks(shards.begin()->second.set.placement.ranks),
                              ", only ", JoinRanks(found), " are there and of one generation"));
    for (auto& [rank, shard] : shards) {
      RefusedEntry& refused = checked_.refused.emplace_back();
      refused.entry.key = ShardKey(fingerprint, rank);
      refused.cause = cause;
      refused.shard = std::move(shard.shard);
    }
  }

  void AddLoad(const std::string& fingerprint, Adoption::Load load) {
    const auto& sets = checked_.adoption.sets;
    const bool finished = std::any_of(sets.begin(), sets.end(), [&](const Adoption::Set& set) {
      return set.request.fingerprint.hash == fingerprint;
    });
    if (finished) {
      checked_.finished_load_keys.push_back(KeptKey(kLoadKind, fingerprint));
    } else {
      checked_.adoption.loads.push_back(std::move(load));
    }
  }

  const GpuFdCheck check_gpu_fd_;
  CheckedEntries checked_;
  std::map<std::string, std::map<int32_t, KeptShard>> shards_;  // by fingerprint and rank
  std::map<std::string, Adoption::Load> loads_;                 // by fingerprint
};

}  // namespace

std::string KeptKey(std::string_view kind, const std::string& fingerprint) {
  return absl::StrCat(ToAbsl(kind), "/", fingerprint);
}

std::string ShardKey(const std::string& fingerprint, int32_t rank) {
  return absl::StrCat(KeptKey(kShardKind, fingerprint), "/", rank);
}

absl::StatusOr<EncodedRecord> EncodeRecord(const std::string& record, size_t max_inline_bytes, int32_t version) {
  internal::v1::KeptValue kept;
  kept.set_version(version);
  EncodedRecord encoded;
  if (record.size() <= max_inline_bytes) {
    kept.set_record(record);
  } else {
    kept.mutable_sealed_record()->set_size_bytes(static_cast<int64_t>(record.size()));
    kept.mutable_sealed_record()->set_sha256(Sha256Bytes(record));
    ASSIGN_OR_RETURN(encoded.memfd, CreateSealedMemfd("weightbroker-record", std::as_bytes(std::span(record))));
  }
  encoded.value = kept.SerializeAsString();
  return encoded;
}

CheckedEntries CheckEntries(std::vector<KeeperEntry> entries,
                            const std::function<void(const std::string& key)>& taking_up, GpuFdCheck check_gpu_fd) {
  return Checker(check_gpu_fd).Check(std::move(entries), taking_up);
}

}  // namespace weightbroker
