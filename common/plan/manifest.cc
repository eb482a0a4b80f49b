#include "common/plan/manifest.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker {
namespace {

constexpr size_t kLengthBytes = 4;
// Tag and length of the chunk within ExportResponse, and tag and length of a tensor within the chunk, at their longest
// for what fits a frame.
constexpr int64_t kChunkOverheadBytes = 8;
constexpr int64_t kRowOverheadBytes = 8;

v1::Tensor ToRow(const TensorPlacement& placement, const Digest& digest) {
  v1::Tensor row;
  row.set_name(placement.name);
  row.set_dtype(placement.dtype->proto);
  row.mutable_shape()->Add(placement.shape.begin(), placement.shape.end());
  row.set_slab(placement.slab);
  row.set_offset_bytes(placement.slab_offset_bytes);
  row.set_size_bytes(placement.size_bytes);
  row.set_alias_of(placement.alias_of);
  row.set_digest(reinterpret_cast<const char*>(digest.data()), digest.size());
  return row;
}

// Collects rows into frames and appends each frame as it fills up.
class FrameWriter {
 public:
  absl::Status Add(v1::Tensor row) {
    const int64_t row_bytes = static_cast<int64_t>(row.ByteSizeLong()) + kRowOverheadBytes;
    if (row_bytes + kChunkOverheadBytes > kMaxManifestFrameBytes) return TooLarge(row, row_bytes);
    if (chunk_bytes_ + row_bytes > kMaxManifestFrameBytes) Flush();
    chunk_bytes_ += row_bytes;
    *frame_.mutable_manifest()->add_tensors() = std::move(row);
    return absl::OkStatus();
  }

  std::string Finish() && {
    if (frame_.manifest().tensors_size() > 0) Flush();
    return std::move(bytes_);
  }

 private:
  void Flush() {
    const auto length = static_cast<uint32_t>(frame_.ByteSizeLong());
    char length_bytes[kLengthBytes];
    for (size_t i = 0; i < kLengthBytes; ++i) length_bytes[i] = static_cast<char>(length >> (8 * i));
    bytes_.append(length_bytes, kLengthBytes);
    frame_.AppendToString(&bytes_);
    frame_.Clear();
    chunk_bytes_ = kChunkOverheadBytes;
  }

  static absl::Status TooLarge(const v1::Tensor& row, int64_t row_bytes) {
    return MakeError(Reason::kCheckpointTooLarge,
                     absl::StrCat("tensor ", Quote(row.name()), ": its row in the manifest takes ", row_bytes,
                                  " bytes; a frame has room for ", kMaxManifestFrameBytes),
                     {{"tensor", Printable(row.name())},
                      {"found_bytes", absl::StrCat(row_bytes)},
                      {"limit_bytes", absl::StrCat(kMaxManifestFrameBytes)}});
  }

  v1::ExportResponse frame_;
  int64_t chunk_bytes_ = kChunkOverheadBytes;  // at least what `frame_` serializes to
  std::string bytes_;
};

absl::Status Torn(size_t at, size_t size) {
  return MakeError(Reason::kProtocolError,
                   absl::StrCat("a manifest of ", size, " bytes is torn at byte ", at, ": its lengths do not add up"),
                   {{"at_byte", absl::StrCat(at)}, {"size_bytes", absl::StrCat(size)}});
}

}  // namespace

absl::StatusOr<std::string> SerializeManifest(const ShardPlan& plan, const std::vector<Digest>& digests) {
  if (digests.size() != plan.tensors.size()) {
    return MakeError(Reason::kProtocolError, absl::StrCat("a manifest of ", plan.tensors.size(), " tensors was given ",
                                                          digests.size(), " digests"));
  }
  FrameWriter writer;
  for (size_t i = 0; i < digests.size(); ++i) RETURN_IF_ERROR(writer.Add(ToRow(plan.tensors[i], digests[i])));
  return std::move(writer).Finish();
}

absl::StatusOr<std::string> SerializeManifest(std::vector<v1::Tensor> rows) {
  FrameWriter writer;
  for (v1::Tensor& row : rows) RETURN_IF_ERROR(writer.Add(std::move(row)));
  return std::move(writer).Finish();
}

absl::StatusOr<std::vector<v1::Tensor>> ParseManifest(std::string_view bytes) {
  ASSIGN_OR_RETURN(const std::vector<std::string_view> frames, SplitManifest(bytes));
  std::vector<v1::Tensor> rows;
  for (const std::string_view frame : frames) {
    v1::ExportResponse response;
    if (!response.ParseFromArray(frame.data(), static_cast<int>(frame.size())) || !response.has_manifest()) {
      return MakeError(Reason::kProtocolError, "a manifest has a frame that is not an ExportResponse with a manifest");
    }
    for (v1::Tensor& row : *response.mutable_manifest()->mutable_tensors()) rows.push_back(std::move(row));
  }
  return rows;
}

absl::StatusOr<std::vector<std::string_view>> SplitManifest(std::string_view bytes) {
  std::vector<std::string_view> frames;
  size_t at = 0;
  while (at < bytes.size()) {
    if (bytes.size() - at < kLengthBytes) return Torn(at, bytes.size());
    size_t length = 0;
    for (size_t i = 0; i < kLengthBytes; ++i)
      length |= static_cast<size_t>(static_cast<unsigned char>(bytes[at + i])) << (8 * i);
    at += kLengthBytes;
    const bool fits =
        length > 0 && length <= static_cast<size_t>(kMaxManifestFrameBytes) && length <= bytes.size() - at;
    if (!fits) return Torn(at - kLengthBytes, bytes.size());
    frames.push_back(bytes.substr(at, length));
    at += length;
  }
  return frames;
}

}  // namespace weightbroker
