#include "server/broker/shard.h"

#include <google/protobuf/arena.h>

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/read_fd.h"
#include "common/base/status_macros.h"
#include "common/identity/sha256.h"
#include "common/memory/host_slab.h"
#include "common/memory/writable_slab.h"
#include "common/plan/manifest.h"
#include "server/broker/names.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker {
namespace {

// What a manifest may take in the broker's own memory; 60,000 tensors take 5 MB.
constexpr int64_t kMaxManifestBytes = int64_t{1} << 30;

constexpr size_t kIpcHandleBytes = 64;

absl::Status ManifestError(const std::string& what) {
  return MakeError(Reason::kProtocolError, absl::StrCat("the shard's manifest ", what));
}

absl::StatusOr<std::string> ReadAll(int fd, int64_t size_bytes) {
  ASSIGN_OR_RETURN(std::string bytes, ReadFd(fd, static_cast<size_t>(size_bytes), "reading a shard's manifest"));
  if (bytes.size() < static_cast<size_t>(size_bytes)) {
    return ManifestError(absl::StrCat("ends after ", bytes.size(), " of ", size_bytes, " bytes"));
  }
  return bytes;
}

absl::Status CheckTensor(const v1::Tensor& tensor, const std::optional<std::string>& previous_name,
                         const std::vector<v1::Slab>& slabs) {
  if (previous_name.has_value() && tensor.name() <= *previous_name) {
    return ManifestError(absl::StrCat("has tensor \"", tensor.name(), "\" after \"", *previous_name, "\": not sorted"));
  }
  if (tensor.slab() < 0 || static_cast<size_t>(tensor.slab()) >= slabs.size()) {
    return ManifestError(
        absl::StrCat("puts tensor \"", tensor.name(), "\" into slab ", tensor.slab(), " of ", slabs.size()));
  }
  const int64_t slab_bytes = slabs[static_cast<size_t>(tensor.slab())].size_bytes();
  if (tensor.offset_bytes() < 0 || tensor.size_bytes() < 0 || tensor.offset_bytes() > slab_bytes ||
      tensor.size_bytes() > slab_bytes - tensor.offset_bytes()) {
    return ManifestError(absl::StrCat("puts tensor \"", tensor.name(), "\" at bytes ", tensor.offset_bytes(), "+",
                                      tensor.size_bytes(), " of a slab of ", slab_bytes));
  }
  return absl::OkStatus();
}

// Checks one frame and counts its tensors in. `last_name` is the last tensor of the frames before, and of this one
// after.
absl::Status CheckFrame(std::string_view frame, const std::vector<v1::Slab>& slabs,
                        std::optional<std::string>* last_name, int64_t* tensor_count) {
  google::protobuf::Arena arena;
  auto* response = google::protobuf::Arena::CreateMessage<v1::ExportResponse>(&arena);
  if (!response->ParseFromArray(frame.data(), static_cast<int>(frame.size())) || !response->has_manifest()) {
    return ManifestError("has a frame that is not an ExportResponse with a manifest");
  }
  for (const v1::Tensor& tensor : response->manifest().tensors()) {
    RETURN_IF_ERROR(CheckTensor(tensor, *last_name, slabs));
    *last_name = tensor.name();
    ++*tensor_count;
  }
  return absl::OkStatus();
}

absl::Status SlabError(size_t slab, const std::string& what) {
  return MakeError(Reason::kProtocolError, absl::StrCat("the shard's slab ", slab, ": ", what),
                   {{"slab", absl::StrCat(slab)}});
}

// What the slabs of a shard must be.
struct SlabRules {
  v1::HandleKind kind;
  const std::string& device;
  GpuFdCheck check_gpu_fd;
  absl::Status (*check_memfd)(int fd, int64_t size_bytes);
};

absl::Status CheckOnGpu(const v1::Slab& slab, const std::string& device) {
  if (slab.device_uuid() == device && slab.size_bytes() > 0) return absl::OkStatus();
  return MakeError(Reason::kProtocolError, absl::StrCat("it has ", slab.size_bytes(), " bytes on the GPU \"",
                                                        slab.device_uuid(), "\", and its shard is on ", device));
}

// `fd` is -1 if none came with it.
absl::Status CheckSlab(const v1::Slab& slab, int fd, const SlabRules& rules) {
  const bool is_ipc = slab.handle_kind() == v1::HANDLE_KIND_CUDA_IPC;
  if (slab.handle_kind() != rules.kind) {
    return MakeError(Reason::kProtocolError, absl::StrCat("it is ", HandleKindName(slab.handle_kind()),
                                                          ", and its shard is ", HandleKindName(rules.kind)));
  }
  if (slab.cuda_ipc_handle().size() != (is_ipc ? kIpcHandleBytes : 0)) {
    return MakeError(Reason::kProtocolError,
                     absl::StrCat("its CUDA IPC handle has ", slab.cuda_ipc_handle().size(), " bytes"));
  }
  switch (slab.handle_kind()) {
    case v1::HANDLE_KIND_HOST_MEMFD:
      return rules.check_memfd(fd, slab.size_bytes());
    case v1::HANDLE_KIND_CUDA_VMM_FD:
      RETURN_IF_ERROR(CheckOnGpu(slab, rules.device));
      return rules.check_gpu_fd(fd);
    case v1::HANDLE_KIND_CUDA_IPC:
      return CheckOnGpu(slab, rules.device);
    default:
      return MakeError(Reason::kProtocolError,
                       absl::StrCat("it is ", HandleKindName(slab.handle_kind()), ", which this broker does not know"));
  }
}

absl::Status CheckSlabs(std::span<const v1::Slab> slabs, std::span<const UniqueFd> fds, const SlabRules& rules) {
  if (fds.size() != SlabFdCount(rules.kind, slabs.size())) {
    return MakeError(Reason::kProtocolError,
                     absl::StrCat("the shard has ", slabs.size(), " slabs of kind ", HandleKindName(rules.kind),
                                  " but ", fds.size(), " descriptors of slabs"));
  }
  for (size_t i = 0; i < slabs.size(); ++i) {
    const absl::Status checked = CheckSlab(slabs[i], fds.empty() ? -1 : fds[i].get(), rules);
    if (!checked.ok()) return SlabError(i, std::string(checked.message()));
  }
  return absl::OkStatus();
}

// Memory of kind CUDA_IPC has no descriptor to ask, so any size may be said of it.
absl::StatusOr<int64_t> SumOf(const std::vector<v1::Slab>& slabs) {
  int64_t sum = 0;
  for (size_t i = 0; i < slabs.size(); ++i) {
    if (!__builtin_add_overflow(sum, slabs[i].size_bytes(), &sum)) continue;
    return MakeError(Reason::kProtocolError,
                     absl::StrCat("slab ", i, " has ", slabs[i].size_bytes(),
                                  " bytes, more than can be addressed together with the others"),
                     {{"slab", absl::StrCat(i)}});
  }
  return sum;
}

}  // namespace

absl::StatusOr<std::shared_ptr<Manifest>> Manifest::Read(ManifestFile file) {
  if (file.size_bytes < 0 || file.size_bytes > kMaxManifestBytes) {
    return ManifestError(
        absl::StrCat("is said to have ", file.size_bytes, " bytes; at most ", kMaxManifestBytes, " are taken"));
  }
  ASSIGN_OR_RETURN(std::string bytes, ReadAll(file.fd.get(), file.size_bytes));
  if (Sha256Bytes(bytes) != file.sha256) return ManifestError("has another SHA-256 than is said of it");
  std::shared_ptr<Manifest> manifest(new Manifest(std::move(file), std::move(bytes)));
  ASSIGN_OR_RETURN(manifest->frames_, SplitManifest(manifest->bytes_));
  return manifest;
}

absl::StatusOr<std::shared_ptr<const Manifest>> Manifest::FromLoader(ManifestFile file,
                                                                     const std::vector<v1::Slab>& slabs,
                                                                     int64_t tensor_count) {
  ASSIGN_OR_RETURN(std::shared_ptr<const Manifest> manifest, Read(std::move(file)));
  RETURN_IF_ERROR(manifest->CheckRows(slabs, tensor_count));
  return manifest;
}

absl::StatusOr<std::shared_ptr<const Manifest>> Manifest::FromVault(ManifestFile file) { return Read(std::move(file)); }

absl::Status Manifest::CheckRows(const std::vector<v1::Slab>& slabs, int64_t tensor_count) const {
  std::optional<std::string> last_name;
  int64_t found = 0;
  for (const std::string_view frame : frames_) {
    if (static_cast<int64_t>(frame.size()) > kMaxManifestFrameBytes) {
      return ManifestError(absl::StrCat("has a frame of ", frame.size(), " bytes; at most ", kMaxManifestFrameBytes));
    }
    RETURN_IF_ERROR(CheckFrame(frame, slabs, &last_name, &found));
  }
  if (found == tensor_count) return absl::OkStatus();
  return ManifestError(absl::StrCat("has ", found, " tensors but ", tensor_count, " were announced"));
}

size_t SlabFdCount(v1::HandleKind kind, size_t slab_count) { return kind == v1::HANDLE_KIND_CUDA_IPC ? 0 : slab_count; }

absl::Status TakeSlabs(std::vector<v1::Slab> slabs, std::vector<UniqueFd>* fds, GpuFdCheck check_gpu_fd, Shard* shard) {
  RETURN_IF_ERROR(CheckSlabs(slabs, *fds, {shard->handle_kind, shard->device, check_gpu_fd, CheckSealedMemfd}));
  ASSIGN_OR_RETURN(shard->size_bytes, SumOf(slabs));
  for (v1::Slab& slab : slabs) {
    if (!slab.cuda_ipc_handle().empty()) shard->ipc_handles.push_back(slab.cuda_ipc_handle());
    slab.clear_cuda_ipc_handle();
  }
  shard->slabs = std::move(slabs);
  shard->slab_fds = std::make_shared<const std::vector<UniqueFd>>(std::exchange(*fds, {}));
  return absl::OkStatus();
}

absl::Status CheckWritableSlabs(std::span<const v1::Slab> slabs, std::span<const UniqueFd> fds, v1::HandleKind kind,
                                const std::string& device, GpuFdCheck check_gpu_fd) {
  return CheckSlabs(slabs, fds, {kind, device, check_gpu_fd, CheckWritableMemfd});
}

std::vector<v1::Slab> SlabsWithHandles(const Shard& shard) {
  std::vector<v1::Slab> slabs = shard.slabs;
  for (size_t i = 0; i < shard.ipc_handles.size(); ++i) slabs[i].set_cuda_ipc_handle(shard.ipc_handles[i]);
  return slabs;
}

absl::Status CheckExportable(const Shard& shard) {
  if (shard.exporter == nullptr || shard.exporter->alive()) return absl::OkStatus();
  return MakeError(Reason::kExporterDead,
                   absl::StrCat("the process that exports the weights on ", shard.device,
                                " by CUDA IPC has ended, and nobody can map them any more; unregister the set and "
                                "register it again"),
                   {{"device_uuid", shard.device}, {"handle_kind", HandleKindName(shard.handle_kind)}});
}

}  // namespace weightbroker
