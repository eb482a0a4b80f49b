// One rank's part of a resident weight set, as the broker holds it: descriptors and the manifest's bytes, never a
// mapping of the weights.
//
//   auto manifest = Manifest::Create(bytes_from_the_loader, slabs, tensor_count);
//   if (!manifest.ok()) return manifest.status();     // PROTOCOL_ERROR: what a loader sent is not trusted blindly
//   for (std::string_view frame : (*manifest)->frames()) ...
//
// Immutable and thread-safe once made.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker {

// The frames of a shard's manifest, in memory that every Export stream shares.
class Manifest {
 public:
  // Splits `bytes` (see common/plan/manifest.h) and checks every row: tensors are sorted by name, lie inside `slabs`,
  // and are `tensor_count` in all. PROTOCOL_ERROR naming the first that is not so.
  static absl::StatusOr<std::shared_ptr<const Manifest>> Create(std::string bytes, const std::vector<v1::Slab>& slabs,
                                                                int64_t tensor_count);

  // Each is a serialized v1.ExportResponse with `manifest` set. They live as long as this object.
  const std::vector<std::string_view>& frames() const { return frames_; }

 private:
  explicit Manifest(std::string bytes) : bytes_(std::move(bytes)) {}

  const std::string bytes_;
  std::vector<std::string_view> frames_;  // into bytes_
};

struct Shard {
  int32_t rank = 0;
  std::string device = "host";
  v1::HandleKind handle_kind = v1::HANDLE_KIND_HOST_MEMFD;
  std::vector<v1::Slab> slabs;
  std::shared_ptr<const std::vector<UniqueFd>> slab_fds;  // one a slab, in their order
  std::shared_ptr<const Manifest> manifest;
  int64_t size_bytes = 0;  // of all slabs
  int64_t tensor_count = 0;
};

}  // namespace weightbroker
