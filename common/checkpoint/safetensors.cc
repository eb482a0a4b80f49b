#include "common/checkpoint/safetensors.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/error.h"
#include "common/base/json.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"
#include "common/checkpoint/file_kind.h"

namespace weightbroker {
namespace {

using Metadata = std::map<std::string, std::string>;

constexpr char kMetadataKey[] = "__metadata__";
constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMinHeaderBytes = 2;  // "{}"

// Makes errors that name the file and, where there is one, the tensor.
class Complaint {
 public:
  explicit Complaint(const std::string& file) : file_(file) {}

  absl::Status File(Reason reason, const std::string& text, Metadata metadata = {}) const {
    metadata["file"] = Printable(file_);
    return MakeError(reason, absl::StrCat(Printable(file_), ": ", text), metadata);
  }
  absl::Status Tensor(const std::string& name, const std::string& text, Metadata metadata = {}) const {
    metadata["tensor"] = Printable(name);
    return File(Reason::kCheckpointMalformed, absl::StrCat("tensor ", Quote(name), " ", text), std::move(metadata));
  }

 private:
  const std::string& file_;
};

std::string ShapeText(const std::vector<int64_t>& shape) { return absl::StrCat("[", absl::StrJoin(shape, ", "), "]"); }

// Bytes that a tensor of this type and shape takes; nullopt if that overflows or is no whole number of bytes. Zero
// dimensions are multiplied last, so that the order of the dimensions makes no difference.
std::optional<int64_t> ComputeSize(const DtypeInfo& dtype, const std::vector<int64_t>& shape) {
  int64_t bits = dtype.bits;
  bool is_empty = false;
  for (const int64_t dimension : shape) {
    if (dimension == 0) {
      is_empty = true;
    } else if (__builtin_mul_overflow(bits, dimension, &bits)) {
      return std::nullopt;
    }
  }
  if (is_empty) return 0;
  if (bits % 8 != 0) return std::nullopt;
  return bits / 8;
}

// Takes the events of a header and fills a SafetensorsHeader: no document is built of a header of 100 MB.
//
//   kTop --{--> kNames --"__metadata__"--> kMetadataValue --{--> kMetadata --}--> kNames
//               kNames --"name"----------> kTensorValue ----{--> kFields --"shape"--> kShape --]--> kFields --}-->
//               kNames
//                                                                kFields --"other"--> kExtra --> kFields
class HeaderHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderHandler(const std::string& file, SafetensorsHeader& header) : complain_(file), header_(header) {}

  // OK unless this handler has stopped the parse.
  const absl::Status& status() const { return status_; }

  bool null() override {
    // The reference reader takes a null __metadata__ for an absent one.
    if (state_ == State::kMetadataValue) return Go(State::kNames);
    return Scalar("null");
  }
  bool boolean(bool /*value*/) override { return Scalar("a boolean"); }
  bool number_float(number_float_t /*value*/, const string_t& text) override {
    return Scalar(absl::StrCat("the number ", Printable(text)));
  }
  bool number_integer(number_integer_t value) override { return Scalar(absl::StrCat("the number ", value)); }
  bool number_unsigned(number_unsigned_t value) override {
    if (state_ != State::kShape && state_ != State::kOffsets) return Scalar(absl::StrCat("the number ", value));
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return Scalar(absl::StrCat("the number ", value, ", which does not fit 63 bits,"));
    }
    return state_ == State::kShape ? AddDimension(static_cast<int64_t>(value)) : AddOffset(static_cast<int64_t>(value));
  }
  bool string(string_t& value) override {
    if (state_ == State::kMetadata) {
      header_.metadata[key_] = std::move(value);
      return true;
    }
    if (state_ == State::kDtype) return SetDtype(value);
    return Scalar(absl::StrCat("the string ", Quote(value)));
  }
  bool binary(binary_t& /*value*/) override { return Scalar("binary data"); }

  bool key(string_t& value) override {
    switch (state_) {
      case State::kNames:
        return StartName(value);
      case State::kFields:
        return StartField(value);
      case State::kMetadata:
        key_ = std::move(value);
        return true;
      default:
        return true;  // inside an extra field
    }
  }

  bool start_object(std::size_t /*size*/) override {
    switch (state_) {
      case State::kTop:
        return Go(State::kNames);
      case State::kMetadataValue:
        return Go(State::kMetadata);
      case State::kTensorValue:
        return Go(State::kFields);
      default:
        return StartNested("an object");
    }
  }
  bool end_object() override {
    switch (state_) {
      case State::kNames:
        return Go(State::kEnd);
      case State::kMetadata:
        return Go(State::kNames);
      case State::kFields:
        return FinishTensor();
      default:
        return EndNested();
    }
  }
  bool start_array(std::size_t /*size*/) override {
    if (state_ == State::kShapeValue) return StartShape();
    if (state_ == State::kOffsetsValue) return Go(State::kOffsets);
    return StartNested("an array");
  }
  bool end_array() override {
    if (state_ == State::kShape) return Go(State::kFields);
    if (state_ == State::kOffsets) return FinishOffsets();
    return EndNested();
  }

  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception&) override { return false; }

 private:
  enum class State {
    kTop,
    kNames,
    kMetadataValue,
    kMetadata,
    kTensorValue,
    kFields,
    kDtype,
    kShapeValue,
    kShape,
    kOffsetsValue,
    kOffsets,
    kExtra,
    kEnd
  };

  bool Go(State state) {
    state_ = state;
    return true;
  }
  bool Stop(absl::Status status) {
    status_ = std::move(status);
    return false;
  }
  bool StopAtTensor(const std::string& text) { return Stop(complain_.Tensor(tensor_.name, text)); }

  bool StartName(std::string& name) {
    if (name == kMetadataKey) return Go(State::kMetadataValue);
    tensor_ = SafetensorsTensor();
    has_shape_ = false;
    offset_count_ = 0;
    tensor_.name = std::move(name);
    if (tensor_.name.find('\0') != std::string::npos) return StopAtTensor("has a NUL in its name");
    return Go(State::kTensorValue);
  }

  bool StartField(const std::string& field) {
    if (field == "dtype") return Go(State::kDtype);
    if (field == "shape") return Go(State::kShapeValue);
    if (field == "data_offsets") return Go(State::kOffsetsValue);
    return Go(State::kExtra);
  }

  bool SetDtype(const std::string& name) {
    tensor_.dtype = FindDtype(name);
    if (tensor_.dtype != nullptr) return Go(State::kFields);
    return Stop(complain_.Tensor(
        tensor_.name, absl::StrCat("has dtype ", Quote(name), "; the format has ", DtypeNames(DtypeUse::kAny)),
        {{"dtype", Printable(name)}}));
  }

  bool StartShape() {
    has_shape_ = true;
    return Go(State::kShape);
  }

  bool AddDimension(int64_t dimension) {
    if (tensor_.shape.size() == static_cast<size_t>(kMaxRank)) {
      return StopAtTensor(absl::StrCat("has more than ", kMaxRank, " dimensions"));
    }
    tensor_.shape.push_back(dimension);
    return true;
  }

  bool AddOffset(int64_t offset) {
    if (offset_count_ == offsets_.size()) return StopAtTensor("has more than two data_offsets");
    offsets_[offset_count_++] = offset;
    return true;
  }

  bool FinishOffsets() {
    if (offset_count_ != offsets_.size()) {
      return StopAtTensor(absl::StrCat("has ", offset_count_, " data_offsets; there must be two, begin and end"));
    }
    return Go(State::kFields);
  }

  bool FinishTensor() {
    state_ = State::kNames;
    if (tensor_.dtype == nullptr) return StopAtTensor("has no dtype");
    if (!has_shape_) return StopAtTensor("has no shape");
    if (offset_count_ == 0) return StopAtTensor("has no data_offsets");
    tensor_.begin_bytes = offsets_[0];
    tensor_.end_bytes = offsets_[1];
    if (tensor_.end_bytes < tensor_.begin_bytes) {
      return StopAtTensor(absl::StrCat("ends at byte ", tensor_.end_bytes, " of the data, before it begins at byte ",
                                       tensor_.begin_bytes));
    }
    const auto size = ComputeSize(*tensor_.dtype, tensor_.shape);
    const std::string what = absl::StrCat(ToAbsl(tensor_.dtype->name), " ", ShapeText(tensor_.shape));
    if (!size.has_value())
      return StopAtTensor(absl::StrCat("is ", what, ": that is no whole number of bytes below 2^60"));
    if (*size != tensor_.size_bytes()) {
      return Stop(complain_.Tensor(
          tensor_.name,
          absl::StrCat("is ", what, ", which takes ", *size, " bytes, but its data_offsets are ", tensor_.size_bytes(),
                       " bytes apart"),
          {{"expected_bytes", absl::StrCat(*size)}, {"found_bytes", absl::StrCat(tensor_.size_bytes())}}));
    }
    header_.tensors.push_back(std::move(tensor_));
    return true;
  }

  // A scalar where the state does not want one, unless it stands in an extra field, which may hold anything.
  bool Scalar(const std::string& what) {
    if (state_ == State::kExtra) return nesting_ > 0 || Go(State::kFields);
    return Unexpected(what);
  }
  bool StartNested(const std::string& what) {
    if (state_ != State::kExtra) return Unexpected(what);
    ++nesting_;
    return true;
  }
  bool EndNested() {
    if (--nesting_ == 0) state_ = State::kFields;
    return true;
  }

  bool Unexpected(const std::string& what) {
    switch (state_) {
      case State::kMetadataValue:
      case State::kMetadata:
        return Stop(complain_.File(
            Reason::kCheckpointMalformed,
            absl::StrCat(kMetadataKey, " has ", what, " where a string must be; it maps strings to strings")));
      case State::kTensorValue:
        return StopAtTensor(absl::StrCat("is described by ", what, "; an object must be there"));
      case State::kDtype:
        return StopAtTensor(absl::StrCat("has ", what, " for dtype; a string must be there"));
      case State::kShapeValue:
      case State::kShape:
        return StopAtTensor(absl::StrCat("has ", what, " in its shape; non-negative integers must be there"));
      case State::kOffsetsValue:
      case State::kOffsets:
        return StopAtTensor(
            absl::StrCat("has ", what, " in its data_offsets; two non-negative integers must be there"));
      default:
        return Stop(complain_.File(Reason::kCheckpointMalformed,
                                   absl::StrCat("its header is ", what, "; an object must be there")));
    }
  }

  const Complaint complain_;
  SafetensorsHeader& header_;
  absl::Status status_;
  State state_ = State::kTop;
  std::string key_;           // in __metadata__
  SafetensorsTensor tensor_;  // the one that is being read
  bool has_shape_ = false;
  std::array<int64_t, 2> offsets_ = {0, 0};
  size_t offset_count_ = 0;
  int nesting_ = 0;  // inside an extra field
};

bool LiesBefore(const SafetensorsTensor& a, const SafetensorsTensor& b) {
  return std::tie(a.begin_bytes, a.end_bytes, a.name) < std::tie(b.begin_bytes, b.end_bytes, b.name);
}

absl::Status HoleOrOverlap(const Complaint& complain, const SafetensorsTensor* before,
                           const SafetensorsTensor& tensor) {
  const int64_t end = before == nullptr ? 0 : before->end_bytes;
  Metadata metadata = {{"expected_bytes", absl::StrCat(end)}, {"found_bytes", absl::StrCat(tensor.begin_bytes)}};
  if (before == nullptr) {
    return complain.Tensor(tensor.name,
                           absl::StrCat("is the first but begins at byte ", tensor.begin_bytes,
                                        " of the data, not at 0: what "
                                        "lies before belongs to no tensor"),
                           std::move(metadata));
  }
  metadata["other_tensor"] = Printable(before->name);
  const bool overlap = tensor.begin_bytes < end;
  return complain.Tensor(
      tensor.name,
      absl::StrCat("begins at byte ", tensor.begin_bytes, " of the data, but ", Quote(before->name), " ends at byte ",
                   end, ": ",
                   overlap ? absl::StrCat("they overlap by ", end - tensor.begin_bytes, " bytes")
                           : absl::StrCat("the ", tensor.begin_bytes - end, " bytes between belong to no tensor")),
      std::move(metadata));
}

// Tensors cover the data from its first byte to its last, each byte once.
absl::Status CheckLayout(const Complaint& complain, const SafetensorsHeader& header) {
  const SafetensorsTensor* before = nullptr;
  for (const SafetensorsTensor& tensor : header.tensors) {
    if (tensor.end_bytes > header.data_size_bytes) {
      return complain.File(Reason::kCheckpointTruncated,
                           absl::StrCat("tensor ", Quote(tensor.name), " ends at byte ", tensor.end_bytes,
                                        " of the data but the file has ", header.data_size_bytes,
                                        " bytes of data: the file is truncated; download it again"),
                           {{"tensor", Printable(tensor.name)},
                            {"expected_bytes", absl::StrCat(tensor.end_bytes)},
                            {"found_bytes", absl::StrCat(header.data_size_bytes)}});
    }
    if (tensor.begin_bytes != (before == nullptr ? 0 : before->end_bytes))
      return HoleOrOverlap(complain, before, tensor);
    before = &tensor;
  }
  const int64_t end = before == nullptr ? 0 : before->end_bytes;
  if (end == header.data_size_bytes) return absl::OkStatus();
  return complain.File(
      Reason::kCheckpointMalformed,
      absl::StrCat("the data has ", header.data_size_bytes, " bytes but ",
                   before == nullptr ? "there are no tensors"
                                     : absl::StrCat("the last tensor, ", Quote(before->name), ", ends at ", end),
                   ": ", header.data_size_bytes - end, " bytes at the end belong to no tensor"),
      {{"expected_bytes", absl::StrCat(end)}, {"found_bytes", absl::StrCat(header.data_size_bytes)}});
}

absl::StatusOr<std::string> ReadHead(File& file, int64_t file_size_bytes) {
  std::string head(static_cast<size_t>(std::min<int64_t>(file_size_bytes, kForeignFileHeadBytes)), '\0');
  RETURN_IF_ERROR(file.ReadExactly(0, std::as_writable_bytes(std::span(head))));
  return head;
}

int64_t LittleEndian64(std::string_view bytes) {
  uint64_t value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8 | static_cast<unsigned char>(bytes[static_cast<size_t>(i)]);
  // Anything that does not fit is far over the limit, which is all that matters.
  return static_cast<int64_t>(std::min<uint64_t>(value, std::numeric_limits<int64_t>::max()));
}

// Checks the first bytes and returns the header's length.
absl::StatusOr<int64_t> CheckHead(const Complaint& complain, std::string_view head, int64_t file_size_bytes) {
  const auto length = [&] { return LittleEndian64(head.substr(0, kLengthBytes)); };
  const bool has_length = file_size_bytes >= kLengthBytes + kMinHeaderBytes;
  if (has_length && length() >= kMinHeaderBytes &&
      length() <= std::min(kMaxHeaderBytes, file_size_bytes - kLengthBytes) && head[kLengthBytes] == '{') {
    return length();
  }
  if (const std::string clause = DescribeForeignFile(head); !clause.empty()) {
    return complain.File(Reason::kCheckpointNotSafetensors, clause);
  }
  if (file_size_bytes < kLengthBytes + kMinHeaderBytes) {
    return complain.File(Reason::kCheckpointTruncated,
                         absl::StrCat("has ", file_size_bytes, " bytes; the smallest safetensors file has ",
                                      kLengthBytes + kMinHeaderBytes, ": it is truncated or empty; download it again"),
                         {{"expected_bytes", absl::StrCat(kLengthBytes + kMinHeaderBytes)},
                          {"found_bytes", absl::StrCat(file_size_bytes)}});
  }
  if (length() > kMaxHeaderBytes) {
    return complain.File(Reason::kCheckpointTooLarge,
                         absl::StrCat("gives its header a length of ", length(), " bytes; the format allows ",
                                      kMaxHeaderBytes, ": it is damaged or no safetensors file"),
                         {{"found_bytes", absl::StrCat(length())}, {"limit_bytes", absl::StrCat(kMaxHeaderBytes)}});
  }
  if (length() > file_size_bytes - kLengthBytes) {
    return complain.File(
        Reason::kCheckpointTruncated,
        absl::StrCat("the header ends at byte ", kLengthBytes + length(), " but the file has ", file_size_bytes,
                     ": the file is truncated; download it again"),
        {{"expected_bytes", absl::StrCat(kLengthBytes + length())}, {"found_bytes", absl::StrCat(file_size_bytes)}});
  }
  if (length() < kMinHeaderBytes) {
    return complain.File(Reason::kCheckpointMalformed, absl::StrCat("gives its header a length of ", length(),
                                                                    "; the shortest, {}, has ", kMinHeaderBytes));
  }
  return complain.File(Reason::kCheckpointMalformed, "its header does not begin with {, as the format demands");
}

}  // namespace

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view json, int64_t data_size_bytes,
                                                         const std::string& file_label) {
  const Complaint complain(file_label);
  if (json.empty() || json.front() != '{') {
    return complain.File(Reason::kCheckpointMalformed, "its header does not begin with {, as the format demands");
  }
  SafetensorsHeader header;
  header.data_offset_bytes = kLengthBytes + static_cast<int64_t>(json.size());
  header.data_size_bytes = data_size_bytes;
  HeaderHandler handler(file_label, header);
  const absl::Status parsed = ParseStrictJsonSax(json, handler);
  RETURN_IF_ERROR(handler.status());
  if (!parsed.ok()) {
    return complain.File(Reason::kCheckpointMalformed,
                         absl::StrCat("its header is not valid JSON: ", std::string(parsed.message())));
  }
  std::sort(header.tensors.begin(), header.tensors.end(), LiesBefore);
  RETURN_IF_ERROR(CheckLayout(complain, header));
  return header;
}

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(File& file, const std::string& file_label) {
  ASSIGN_OR_RETURN(const FileStat stat, file.Stat());
  ASSIGN_OR_RETURN(const std::string head, ReadHead(file, stat.size_bytes));
  ASSIGN_OR_RETURN(const int64_t length, CheckHead(Complaint(file_label), head, stat.size_bytes));
  std::string json(static_cast<size_t>(length), '\0');
  RETURN_IF_ERROR(file.ReadExactly(kLengthBytes, std::as_writable_bytes(std::span(json))));
  return ParseSafetensorsHeader(json, stat.size_bytes - kLengthBytes - length, file_label);
}

}  // namespace weightbroker
