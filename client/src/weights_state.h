// What a MappedWeights owns, wherever it came from.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "client/src/lease.h"
#include "client/src/manifest_decoder.h"
#include "client/src/shard_memory.h"
#include "weightbroker/mapped_weights.h"

namespace weightbroker::client {

// Members are destroyed from the last to the first: the memory is unmapped before the lease ends.
struct WeightsState {
  std::unique_ptr<Lease> lease;  // null from disk
  std::unique_ptr<ShardMemory> memory;
  Manifest manifest;
  Source source;
  std::string fingerprint;
  int64_t generation = 0;
  AttachTimes times;
};

// Compares every tensor's digest with the manifest's, with `threads` threads (0 chooses). If one differs the service is
// told, before the DIGEST_MISMATCH that names the tensor comes back.
absl::Status VerifyAndReport(const WeightsState& state, int threads);

}  // namespace weightbroker::client
