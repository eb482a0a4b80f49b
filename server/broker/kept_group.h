// Between an engine group and the record of it that is kept with a vault (kept_group.proto). Pure functions,
// thread-safe.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/broker/vault.h"
#include "weightbroker/internal/v1/kept_group.pb.h"

namespace weightbroker {

inline constexpr char kGroupKind[] = "group";

internal::v1::GroupRecord MakeGroupRecord(const KeptGroup& group);

// PROTOCOL_ERROR unless it is of the group `name` and comes with one descriptor, which is taken. What the page behind
// it says is not looked at.
absl::StatusOr<KeptGroup> ReadGroupRecord(const std::string& name, const internal::v1::GroupRecord& record,
                                          std::vector<UniqueFd>* fds);

}  // namespace weightbroker
