// One rank's part of a resident weight set, as the broker holds it: descriptors and the manifest's bytes, never a
// mapping of the weights.
//
//   auto manifest = Manifest::FromLoader({std::move(fd), size_bytes, sha256}, slabs, tensor_count);
//   if (!manifest.ok()) return manifest.status();     // PROTOCOL_ERROR: what a loader sent is not trusted blindly
//   for (std::string_view frame : (*manifest)->frames()) ...
//
// Immutable and thread-safe once made.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker {

// A memfd with the bytes of a manifest (see common/plan/manifest.h), and what is said of it.
struct ManifestFile {
  UniqueFd fd;
  int64_t size_bytes = 0;
  std::string sha256;  // 32 bytes
};

// The frames of a shard's manifest, in memory that every Export stream shares.
class Manifest {
 public:
  // Reads it whole, checks its SHA-256, and every row: tensors are sorted by name, lie inside `slabs`, and are
  // `tensor_count` in all. PROTOCOL_ERROR naming the first that is not so.
  static absl::StatusOr<std::shared_ptr<const Manifest>> FromLoader(ManifestFile file,
                                                                    const std::vector<v1::Slab>& slabs,
                                                                    int64_t tensor_count);

  // The same for one whose rows were checked when its SHA-256 was written down: they are not checked again, which for
  // 60,000 tensors would take longer than all the rest of a broker's start.
  static absl::StatusOr<std::shared_ptr<const Manifest>> FromVault(ManifestFile file);

  // Each is a serialized v1.ExportResponse with `manifest` set. They live as long as this object.
  const std::vector<std::string_view>& frames() const { return frames_; }

  const ManifestFile& file() const { return file_; }

 private:
  Manifest(ManifestFile file, std::string bytes) : file_(std::move(file)), bytes_(std::move(bytes)) {}

  static absl::StatusOr<std::shared_ptr<Manifest>> Read(ManifestFile file);
  absl::Status CheckRows(const std::vector<v1::Slab>& slabs, int64_t tensor_count) const;

  const ManifestFile file_;
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

// Checks slabs against what the kernel says of their descriptors, one a slab, and gives the sum of their sizes.
// PROTOCOL_ERROR naming the slab: see CheckSealedMemfd.
absl::StatusOr<int64_t> CheckSlabs(const std::vector<v1::Slab>& slabs, const std::vector<UniqueFd>& fds);

}  // namespace weightbroker
