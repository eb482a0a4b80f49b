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
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"
#include "common/memory/gpu_fd.h"
#include "server/broker/exporter.h"
#include "server/broker/publisher_process.h"
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
  std::vector<v1::Slab> slabs;  // without CUDA IPC handles, so that no view of it gives them away
  // What maps the slabs, in their order: descriptors, or for CUDA_IPC no descriptors but 64 bytes each, and their
  // maker.
  std::shared_ptr<const std::vector<UniqueFd>> slab_fds;
  std::vector<std::string> ipc_handles;
  std::shared_ptr<const Exporter> exporter;
  std::shared_ptr<const PublisherProcess> publisher;  // of published GPU memory; null otherwise
  std::shared_ptr<const Manifest> manifest;
  int64_t size_bytes = 0;  // of all slabs
  int64_t tensor_count = 0;
};

// What is done to see that a descriptor is GPU memory; another for tests on machines without a GPU.
using GpuFdCheck = absl::Status (*)(int fd);

// How many descriptors come with `slab_count` slabs of a kind: one each, or none.
size_t SlabFdCount(v1::HandleKind kind, size_t slab_count);

// Checks `slabs`, with their IPC handles, as those of a shard of `kind` on `device`, and puts them into `shard`. Sealed
// memfds are checked against what the kernel says of them (see CheckSealedMemfd), GPU memory as far as that goes (see
// CheckGpuMemoryFd). PROTOCOL_ERROR naming the slab; then `fds` are as they were.
absl::Status TakeSlabs(std::vector<v1::Slab> slabs, std::vector<UniqueFd>* fds, GpuFdCheck check_gpu_fd, Shard* shard);

// The same for slabs that a publisher gets, of a shard of `kind` on `device`, and their descriptors, where that kind
// has any: memfds that can be written to and whose length is fixed (see CheckWritableMemfd), GPU memory as for
// TakeSlabs.
absl::Status CheckWritableSlabs(std::span<const v1::Slab> slabs, std::span<const UniqueFd> fds, v1::HandleKind kind,
                                const std::string& device, GpuFdCheck check_gpu_fd);

// The shard's slabs with their IPC handles, for whoever may map them.
std::vector<v1::Slab> SlabsWithHandles(const Shard& shard);

// EXPORTER_DEAD if nobody can map it any more, because the process that exports it has ended; ok otherwise.
absl::Status CheckExportable(const Shard& shard);

}  // namespace weightbroker
