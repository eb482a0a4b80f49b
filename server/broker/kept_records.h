// Between what the broker knows of a weight set and the records that it keeps with a vault (kept.proto). Pure
// functions, thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "server/broker/vault.h"
#include "server/broker/weight_set.h"
#include "weightbroker/internal/v1/kept.pb.h"

namespace weightbroker {

internal::v1::ShardRecord MakeShardRecord(const ShardToKeep& kept);
internal::v1::LoadRecord MakeLoadRecord(const NewWeightSet& set, int32_t attempt);
internal::v1::AliasRecord MakeAliasRecord(const KeptAlias& alias);

// PROTOCOL_ERROR unless the fingerprint is the one of its components and the ranks are in order and of the spec.
absl::StatusOr<NewWeightSet> ReadWeightSet(const internal::v1::WeightSetRecord& record);
KeptAlias ReadAliasRecord(const std::string& name, const internal::v1::AliasRecord& record);
Residency ReadResidency(const internal::v1::ShardRecord& record);

}  // namespace weightbroker
