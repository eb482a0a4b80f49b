#include "server/broker/shard.h"

#include <google/protobuf/arena.h>

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/plan/manifest.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker {
namespace {

absl::Status ManifestError(const std::string& what) {
  return MakeError(Reason::kProtocolError, absl::StrCat("the loader's manifest ", what));
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

}  // namespace

absl::StatusOr<std::shared_ptr<const Manifest>> Manifest::Create(std::string bytes, const std::vector<v1::Slab>& slabs,
                                                                 int64_t tensor_count) {
  std::shared_ptr<Manifest> manifest(new Manifest(std::move(bytes)));
  ASSIGN_OR_RETURN(manifest->frames_, SplitManifest(manifest->bytes_));
  std::optional<std::string> last_name;
  int64_t found = 0;
  for (const std::string_view frame : manifest->frames_) {
    if (static_cast<int64_t>(frame.size()) > kMaxManifestFrameBytes) {
      return ManifestError(absl::StrCat("has a frame of ", frame.size(), " bytes; at most ", kMaxManifestFrameBytes));
    }
    RETURN_IF_ERROR(CheckFrame(frame, slabs, &last_name, &found));
  }
  if (found != tensor_count) {
    return ManifestError(absl::StrCat("has ", found, " tensors but ", tensor_count, " were announced"));
  }
  return std::shared_ptr<const Manifest>(std::move(manifest));
}

}  // namespace weightbroker
