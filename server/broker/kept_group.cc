#include "server/broker/kept_group.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "server/broker/timestamp.h"

namespace weightbroker {

internal::v1::GroupRecord MakeGroupRecord(const KeptGroup& group) {
  internal::v1::GroupRecord record;
  record.set_name(group.name);
  record.set_fingerprint(group.fingerprint);
  record.set_owner_uid(group.owner_uid);
  if (group.allowed_gid.has_value()) record.set_allowed_gid(*group.allowed_gid);
  record.set_heartbeat_timeout_ns(group.heartbeat_timeout.count());
  SetTimestamp(group.create_time, record.mutable_create_time());
  return record;
}

absl::StatusOr<KeptGroup> ReadGroupRecord(const std::string& name, const internal::v1::GroupRecord& record,
                                          std::vector<UniqueFd>* fds) {
  if (record.name() != name) {
    return MakeError(Reason::kProtocolError,
                     absl::StrCat("its record is of the engine group ", record.name(), ", not of the one in its key"));
  }
  if (fds->size() != 1) {
    return MakeError(Reason::kProtocolError,
                     absl::StrCat("it has ", fds->size(), " descriptors, not the one of a page"));
  }
  KeptGroup group;
  group.name = record.name();
  group.fingerprint = record.fingerprint();
  group.owner_uid = record.owner_uid();
  if (record.has_allowed_gid()) group.allowed_gid = record.allowed_gid();
  group.heartbeat_timeout = std::chrono::nanoseconds(record.heartbeat_timeout_ns());
  group.create_time = ToTimePoint(record.create_time());
  group.page = std::make_shared<const std::vector<UniqueFd>>(std::move(*fds));
  fds->clear();
  return group;
}

}  // namespace weightbroker
