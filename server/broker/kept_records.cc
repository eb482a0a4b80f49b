#include "server/broker/kept_records.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/plan/plan.h"
#include "server/broker/timestamp.h"

namespace weightbroker {
namespace {

void WriteStat(const FileStat& stat, internal::v1::FileIdentity* proto) {
  proto->set_device(stat.device);
  proto->set_inode(stat.inode);
  proto->set_size_bytes(stat.size_bytes);
  proto->set_mtime_ns(stat.mtime_ns);
  proto->set_ctime_ns(stat.ctime_ns);
}

FileStat ReadStat(const internal::v1::FileIdentity& proto) {
  return {.device = proto.device(),
          .inode = proto.inode(),
          .size_bytes = proto.size_bytes(),
          .mtime_ns = proto.mtime_ns(),
          .ctime_ns = proto.ctime_ns(),
          .is_regular_file = true,
          .is_directory = false};
}

void WriteIdentity(const CheckpointIdentity& identity, internal::v1::WeightSetRecord* record) {
  WriteStat(identity.folder_stat, record->mutable_folder());
  for (const FileIdentity& file : identity.files) {
    internal::v1::KeptFile* const kept = record->add_files();
    kept->mutable_identity()->set_name(file.name);
    WriteStat(file.stat, kept->mutable_identity());
    kept->set_contents_sha256(file.contents_sha256);
    kept->set_header_sha256(file.header_sha256);
  }
}

CheckpointIdentity ReadIdentity(const internal::v1::WeightSetRecord& record) {
  CheckpointIdentity identity{.folder = record.spec().model(), .files = {}};
  identity.folder_stat = ReadStat(record.folder());
  identity.folder_stat.is_regular_file = false;
  identity.folder_stat.is_directory = true;
  for (const internal::v1::KeptFile& kept : record.files()) {
    identity.files.push_back({.name = kept.identity().name(),
                              .stat = ReadStat(kept.identity()),
                              .contents_sha256 = kept.contents_sha256(),
                              .header_sha256 = kept.header_sha256()});
  }
  return identity;
}

void WriteWeightSet(const NewWeightSet& set, internal::v1::WeightSetRecord* record) {
  *record->mutable_spec() = set.spec;
  *record->mutable_environment() = set.environment;
  record->set_fingerprint(set.fingerprint.hash);
  for (const auto& [field, value] : set.fingerprint.components) {
    v1::FingerprintComponent* const component = record->add_components();
    component->set_field(field);
    component->set_value(value);
  }
  WriteIdentity(*set.identity, record);
  for (const RankPlacement& placed : set.placement.ranks) {
    internal::v1::RankPlacement* const rank = record->add_ranks();
    rank->set_rank(placed.rank);
    rank->set_device(placed.device);
  }
  record->set_handle_kind(set.placement.handle_kind);
  record->set_pinned(set.pins.by_caller);
  record->set_desired(set.pins.by_desired_state);
}

absl::StatusOr<Placement> ReadPlacement(const internal::v1::WeightSetRecord& record) {
  Placement placement;
  placement.world_size = WorldSize(record.spec());
  if (record.ranks().empty()) return placement;
  placement.handle_kind = record.handle_kind();
  placement.ranks.clear();
  int32_t least = 0;
  for (const internal::v1::RankPlacement& rank : record.ranks()) {
    if (rank.rank() < least || rank.rank() >= placement.world_size) {
      return MakeError(Reason::kProtocolError, absl::StrCat("rank ", rank.rank(), " of ", placement.world_size,
                                                            " is placed out of order or out of range"));
    }
    least = rank.rank() + 1;
    placement.ranks.push_back({rank.rank(), rank.device()});
  }
  return placement;
}

}  // namespace

internal::v1::ShardRecord MakeShardRecord(const ShardToKeep& kept) {
  const auto& [set, residency, shard, rank_count, quarantine] = kept;
  internal::v1::ShardRecord record;
  WriteWeightSet(set, record.mutable_weight_set());
  record.set_generation(residency.generation);
  record.set_rank(shard.rank);
  record.set_rank_count(rank_count);
  record.set_quarantine(quarantine);
  record.set_device(shard.device);
  record.set_handle_kind(shard.handle_kind);
  for (v1::Slab& slab : SlabsWithHandles(shard)) *record.add_slabs() = std::move(slab);
  record.set_tensor_count(shard.tensor_count);
  record.set_manifest_bytes(shard.manifest->file().size_bytes);
  record.set_manifest_sha256(shard.manifest->file().sha256);
  SetTimestamp(residency.register_time, record.mutable_register_time());
  SetTimestamp(residency.resident_time, record.mutable_resident_time());
  record.set_load_seconds(residency.load_seconds);
  record.set_read_bytes(residency.read_bytes);
  if (shard.publisher != nullptr) {
    record.mutable_publisher()->set_process_id(shard.publisher->pid());
    record.mutable_publisher()->set_start_ticks(shard.publisher->start_ticks());
  }
  return record;
}

internal::v1::LoadRecord MakeLoadRecord(const NewWeightSet& set, int32_t attempt) {
  internal::v1::LoadRecord record;
  WriteWeightSet(set, record.mutable_weight_set());
  record.set_attempt(attempt);
  return record;
}

absl::StatusOr<NewWeightSet> ReadWeightSet(const internal::v1::WeightSetRecord& record) {
  NewWeightSet set;
  set.spec = record.spec();
  set.environment = record.environment();
  set.fingerprint.hash = record.fingerprint();
  for (const v1::FingerprintComponent& component : record.components()) {
    set.fingerprint.components[component.field()] = component.value();
  }
  if (const std::string found = HashComponents(set.fingerprint.components); found != set.fingerprint.hash) {
    return MakeError(Reason::kProtocolError, absl::StrCat("its fingerprint is not that of its components, ", found),
                     {{"found", found}});
  }
  set.identity = std::make_shared<const CheckpointIdentity>(ReadIdentity(record));
  ASSIGN_OR_RETURN(set.placement, ReadPlacement(record));
  set.pins = {.by_caller = record.pinned(), .by_desired_state = record.desired()};
  return set;
}

internal::v1::AliasRecord MakeAliasRecord(const KeptAlias& alias) {
  internal::v1::AliasRecord record;
  record.set_fingerprint(alias.fingerprint);
  record.set_previous_fingerprint(alias.previous_fingerprint);
  SetTimestamp(alias.move_time, record.mutable_move_time());
  return record;
}

KeptAlias ReadAliasRecord(const std::string& name, const internal::v1::AliasRecord& record) {
  return {name, record.fingerprint(), record.previous_fingerprint(), ToTimePoint(record.move_time())};
}

Residency ReadResidency(const internal::v1::ShardRecord& record) {
  return {.generation = record.generation(),
          .register_time = ToTimePoint(record.register_time()),
          .resident_time = ToTimePoint(record.resident_time()),
          .load_seconds = record.load_seconds(),
          .read_bytes = record.read_bytes()};
}

}  // namespace weightbroker
