#include "client/src/manifest_decoder.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"
#include "common/base/wire.h"
#include "common/plan/plan.h"

namespace weightbroker::client {
namespace {

// Field numbers of weightbroker.v1.ExportResponse, ManifestChunk and Tensor.
constexpr int kResponseManifest = 2;
constexpr int kChunkTensors = 1;
enum TensorField : int {
  kName = 1,
  kDtype = 2,
  kShape = 3,
  kSlab = 4,
  kOffsetBytes = 5,
  kSizeBytes = 6,
  kAliasOf = 7,
  kDigest = 8,
  kStrides = 9,
  kKind = 10,
  kMetadata = 11,
};

// What a service may announce before it has sent anything: memory for more is taken as tensors arrive.
constexpr int64_t kMaxReservedTensors = 1 << 17;

absl::Status NotTrusted(std::string_view tensor, const std::string& what) {
  return MakeError(Reason::kProtocolError,
                   absl::StrCat("the service sent a manifest that cannot be right: tensor \"", ToAbsl(tensor), "\" ",
                                what, "; service and client library may be of different versions"),
                   {{"tensor", std::string(tensor)}, {"fault", what}});
}

absl::Status NotTrusted(const std::string& what) {
  return MakeError(Reason::kProtocolError, absl::StrCat("the service sent a manifest that cannot be right: ", what),
                   {{"fault", what}});
}

// Whether a known field is of its own kind on the wire. Numbers of a list may come packed or one by one.
bool HasItsType(const WireReader& reader) {
  using Type = WireReader::Type;
  switch (reader.field()) {
    case kDtype:
    case kSlab:
    case kOffsetBytes:
    case kSizeBytes:
    case kKind:
      return reader.type() == Type::kVarint;
    case kShape:
    case kStrides:
      return reader.type() == Type::kVarint || reader.type() == Type::kLength;
    case kName:
    case kAliasOf:
    case kDigest:
    case kMetadata:
      return reader.type() == Type::kLength;
    default:
      return true;
  }
}

// Appends a list's numbers. False if the last one is cut off.
bool AppendNumbers(const WireReader& reader, std::vector<int64_t>* values) {
  if (reader.type() == WireReader::Type::kVarint) {
    values->push_back(static_cast<int64_t>(reader.varint()));
    return true;
  }
  uint64_t value = 0;
  int shift = 0;
  for (const char c : reader.bytes()) {
    const auto byte = static_cast<unsigned char>(c);
    if (shift > 63) return false;
    value |= static_cast<uint64_t>(byte & 0x7F) << shift;
    shift += 7;
    if (byte >= 0x80) continue;
    values->push_back(static_cast<int64_t>(value));
    value = 0;
    shift = 0;
  }
  return shift == 0;
}

// The length that dtype and shape give; -1 if a dimension is negative or the product overflows.
int64_t ContiguousBytes(DataType dtype, const std::vector<int64_t>& shape) {
  int64_t bytes = DataTypeBytes(dtype);
  for (const int64_t dimension : shape) {
    if (dimension < 0 || __builtin_mul_overflow(bytes, dimension, &bytes)) return -1;
  }
  return bytes;
}

// The length from the first element to the last, with strides if there are any; -1 if it cannot be.
int64_t ExpectedBytes(DataType dtype, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
  const int64_t contiguous = ContiguousBytes(dtype, shape);
  if (strides.empty() || contiguous <= 0) return contiguous;
  if (strides.size() != shape.size()) return -1;
  int64_t elements = 1;
  for (size_t i = 0; i < shape.size(); ++i) {
    int64_t distance = 0;
    if (strides[i] < 0 || __builtin_mul_overflow(shape[i] - 1, strides[i], &distance) ||
        __builtin_add_overflow(elements, distance, &elements)) {
      return -1;
    }
  }
  int64_t bytes = 0;
  return __builtin_mul_overflow(elements, DataTypeBytes(dtype), &bytes) ? -1 : bytes;
}

// Whether the bytes of `part` are among those of `whole`.
bool LiesInside(const Tensor& part, const Tensor& whole) {
  if (part.size_bytes == 0) return true;
  return whole.size_bytes > 0 && part.data >= whole.data &&
         part.data + part.size_bytes <= whole.data + whole.size_bytes;
}

// An entry of a map<string, string>.
std::optional<TensorNote> ParseNote(std::string_view bytes) {
  TensorNote note;
  WireReader reader(bytes);
  while (reader.Next()) {
    if (reader.field() == 1) note.first = reader.bytes();
    if (reader.field() == 2) note.second = reader.bytes();
  }
  if (!reader.ok()) return std::nullopt;
  return note;
}

}  // namespace

struct ManifestDecoder::Row {
  std::string_view name;
  DataType dtype = DataType::kUnspecified;
  int64_t slab = 0;
  int64_t offset_bytes = 0;
  int64_t size_bytes = 0;
  std::string_view alias_of;
  std::string_view digest;
  TensorKind kind = TensorKind::kUnspecified;
  std::vector<TensorNote> metadata;
};

Dimensions DimensionPool::Copy(const std::vector<int64_t>& dimensions) {
  if (dimensions.empty()) return Dimensions();
  if (dimensions.size() > left_) {
    left_ = std::max(kBlockSize, dimensions.size());
    blocks_.push_back(std::unique_ptr<int64_t[]>(new int64_t[left_]));
    next_ = blocks_.back().get();
  }
  std::copy(dimensions.begin(), dimensions.end(), next_);
  const Dimensions copy(next_, dimensions.size());
  next_ += dimensions.size();
  left_ -= dimensions.size();
  return copy;
}

const Tensor* FindTensor(const std::vector<Tensor>& tensors, std::string_view name) {
  const auto found =
      std::lower_bound(tensors.begin(), tensors.end(), name,
                       [](const Tensor& tensor, std::string_view wanted) { return tensor.name < wanted; });
  return found != tensors.end() && found->name == name ? &*found : nullptr;
}

ManifestDecoder::ManifestDecoder(std::vector<int64_t> slab_bytes, int64_t tensor_count)
    : slab_bytes_(std::move(slab_bytes)), tensor_count_(tensor_count) {
  const auto expected = static_cast<size_t>(std::clamp<int64_t>(tensor_count, 0, kMaxReservedTensors));
  manifest_.tensors.reserve(expected);
  places_.reserve(expected);
}

absl::Status ManifestDecoder::Add(RawMessage message) {
  manifest_.messages.push_back(std::move(message));
  WireReader reader(manifest_.messages.back().bytes());
  while (reader.Next()) {
    if (reader.field() != kResponseManifest) {
      return NotTrusted(
          absl::StrCat("field ", reader.field(), " of ExportResponse came before the manifest was complete"));
    }
    RETURN_IF_ERROR(AddChunk(reader.bytes()));
  }
  return reader.ok() ? absl::OkStatus() : NotTrusted("a message is not a serialized ExportResponse");
}

absl::Status ManifestDecoder::AddChunk(std::string_view chunk) {
  WireReader reader(chunk);
  while (reader.Next()) {
    if (reader.field() == kChunkTensors) RETURN_IF_ERROR(AddRow(reader.bytes()));
  }
  return reader.ok() ? absl::OkStatus() : NotTrusted("a message is not a serialized ManifestChunk");
}

absl::Status ManifestDecoder::AddRow(std::string_view bytes) {
  Row row;
  RETURN_IF_ERROR(ParseRow(bytes, &row));
  RETURN_IF_ERROR(CheckRow(row));

  Tensor& tensor = manifest_.tensors.emplace_back();
  tensor.name = row.name;
  tensor.dtype = row.dtype;
  tensor.shape = manifest_.dimensions.Copy(shape_);
  tensor.size_bytes = row.size_bytes;
  tensor.alias_of = row.alias_of;
  tensor.stated_strides = manifest_.dimensions.Copy(strides_);
  tensor.kind = row.kind;
  tensor.metadata = std::move(row.metadata);
  memcpy(tensor.digest.data(), row.digest.data(), tensor.digest.size());
  places_.push_back({static_cast<size_t>(row.slab), row.offset_bytes});
  if (row.alias_of.empty()) manifest_.total_bytes += row.size_bytes;
  return absl::OkStatus();
}

absl::Status ManifestDecoder::ParseRow(std::string_view bytes, Row* row) {
  shape_.clear();
  strides_.clear();
  WireReader reader(bytes);
  bool well_formed = true;
  while (reader.Next()) {
    well_formed = HasItsType(reader) && well_formed;
    switch (reader.field()) {
      case kName:
        row->name = reader.bytes();
        break;
      case kDtype:
        row->dtype = static_cast<DataType>(reader.varint());
        break;
      case kShape:
        well_formed = AppendNumbers(reader, &shape_) && well_formed;
        break;
      case kSlab:
        row->slab = static_cast<int64_t>(reader.varint());
        break;
      case kOffsetBytes:
        row->offset_bytes = static_cast<int64_t>(reader.varint());
        break;
      case kSizeBytes:
        row->size_bytes = static_cast<int64_t>(reader.varint());
        break;
      case kAliasOf:
        row->alias_of = reader.bytes();
        break;
      case kDigest:
        row->digest = reader.bytes();
        break;
      case kStrides:
        well_formed = AppendNumbers(reader, &strides_) && well_formed;
        break;
      case kKind:
        row->kind = static_cast<TensorKind>(reader.varint());
        break;
      case kMetadata: {
        const std::optional<TensorNote> note = ParseNote(reader.bytes());
        if (note.has_value()) row->metadata.push_back(*note);
        well_formed = note.has_value() && well_formed;
        break;
      }
      default:  // of a later version
        break;
    }
  }
  std::sort(row->metadata.begin(), row->metadata.end());
  return reader.ok() && well_formed ? absl::OkStatus() : NotTrusted(row->name, "is not a serialized Tensor");
}

absl::Status ManifestDecoder::CheckRow(const Row& row) const {
  const std::vector<Tensor>& before = manifest_.tensors;
  if (complete()) return NotTrusted(row.name, absl::StrCat("is one more than the ", tensor_count_, " announced"));
  if (row.name.empty()) return NotTrusted(row.name, "has no name");
  if (!before.empty() && before.back().name >= row.name) {
    return NotTrusted(row.name, absl::StrCat("comes after \"", ToAbsl(before.back().name), "\": not sorted, or twice"));
  }
  if (DataTypeBytes(row.dtype) == 0) {
    return NotTrusted(row.name, absl::StrCat("has the unknown element type ", static_cast<int32_t>(row.dtype)));
  }
  if (const int64_t expected = ExpectedBytes(row.dtype, shape_, strides_); row.size_bytes != expected) {
    return NotTrusted(row.name, absl::StrCat("has ", row.size_bytes, " bytes but type and shape give ", expected));
  }
  if (row.digest.size() != TensorDigest().size()) {
    return NotTrusted(row.name, absl::StrCat("has a digest of ", row.digest.size(), " bytes instead of 16"));
  }
  if (row.size_bytes == 0) return absl::OkStatus();
  if (row.slab < 0 || row.slab >= static_cast<int64_t>(slab_bytes_.size())) {
    return NotTrusted(row.name, absl::StrCat("lies in slab ", row.slab, " of ", slab_bytes_.size()));
  }
  const int64_t alignment = row.alias_of.empty() ? kTensorAlignmentBytes : DataTypeBytes(row.dtype);
  if (row.offset_bytes < 0 || row.offset_bytes % alignment != 0) {
    return NotTrusted(row.name, absl::StrCat("lies at offset ", row.offset_bytes, ", not a multiple of ", alignment));
  }
  const int64_t slab_bytes = slab_bytes_[static_cast<size_t>(row.slab)];
  if (row.size_bytes > slab_bytes || row.offset_bytes > slab_bytes - row.size_bytes) {
    return NotTrusted(row.name, absl::StrCat("takes ", row.size_bytes, " bytes from offset ", row.offset_bytes,
                                             " of a slab of ", slab_bytes));
  }
  return absl::OkStatus();
}

absl::Status ManifestDecoder::CheckAliases() const {
  for (const Tensor& alias : manifest_.tensors) {
    if (alias.alias_of.empty()) continue;
    const Tensor* target = FindTensor(manifest_.tensors, alias.alias_of);
    if (target == nullptr || !target->alias_of.empty() || !LiesInside(alias, *target)) {
      return NotTrusted(alias.name, absl::StrCat("is an alias of \"", ToAbsl(alias.alias_of),
                                                 "\", which is no tensor with that memory"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Manifest> ManifestDecoder::Finish(std::span<const SlabView> slabs) && {
  if (!complete()) {
    return NotTrusted(
        absl::StrCat("it has ", manifest_.tensors.size(), " tensors but ", tensor_count_, " were announced"));
  }
  for (size_t i = 0; i < places_.size(); ++i) {
    Tensor& tensor = manifest_.tensors[i];
    if (tensor.size_bytes > 0) tensor.data = slabs[places_[i].slab].data + places_[i].offset_bytes;
  }
  RETURN_IF_ERROR(CheckAliases());
  return std::move(manifest_);
}

}  // namespace weightbroker::client
