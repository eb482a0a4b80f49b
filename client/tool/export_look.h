// A shard as Export describes it, without a lease and without handles: nothing of it is held, or mapped.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "client/src/connection.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker::tool {

struct ShardLook {
  v1::ExportHeader header;
  std::vector<v1::Tensor> tensors;  // sorted by name
};

// Makes the Export that `request` says, with `hold` left out. Fails with the service's error.
absl::StatusOr<ShardLook> LookAtShard(const client::Connection& connection, v1::ExportRequest request,
                                      client::Deadline deadline);

}  // namespace weightbroker::tool
