// The manifest of a shard, serialized once and sent to every engine as it is.
//
// Its bytes are frames: a 4-byte little-endian length, then that many bytes of a serialized v1.ExportResponse with
// `manifest` set. Frames are at most kMaxManifestFrameBytes long; tensors are sorted by name across them. The format is
// described in docs/manifest-format.md. Thread-safe: all functions are pure.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "common/memory/digest.h"
#include "common/plan/plan.h"

namespace weightbroker {

// Under 1 MiB with the gRPC prefix; a bare stub's default limit is 4 MiB.
inline constexpr int64_t kMaxManifestFrameBytes = 1 << 20;

// `digests` has one entry for each of `plan.tensors`, in that order. A single tensor whose row does not fit a frame
// (a name of a megabyte) is refused with CHECKPOINT_TOO_LARGE.
absl::StatusOr<std::string> SerializeManifest(const ShardPlan& plan, const std::vector<Digest>& digests);

// The same of rows as they are, which must be sorted by name.
absl::StatusOr<std::string> SerializeManifest(std::vector<v1::Tensor> rows);

// The rows of a serialized manifest, in its order. PROTOCOL_ERROR if it is torn, or a frame is something else.
absl::StatusOr<std::vector<v1::Tensor>> ParseManifest(std::string_view bytes);

// Splits into frames' payloads, which point into `bytes`. PROTOCOL_ERROR if lengths do not add up.
absl::StatusOr<std::vector<std::string_view>> SplitManifest(std::string_view bytes);

}  // namespace weightbroker
