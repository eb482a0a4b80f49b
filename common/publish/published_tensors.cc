#include "common/publish/published_tensors.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"
#include "common/checkpoint/dtype.h"
#include "common/identity/sha256.h"
#include "common/plan/plan.h"

namespace weightbroker {
namespace {

constexpr int64_t kMaxBytes = std::numeric_limits<int64_t>::max();

absl::Status Invalid(const std::string& name, const std::string& what) {
  return MakeError(Reason::kManifestInvalid, absl::StrCat("tensor ", Quote(name), " ", what),
                   {{"tensor", Printable(name)}});
}

const DtypeInfo* ServableDtype(v1::DataType dtype) {
  return v1::DataType_IsValid(dtype) && dtype != v1::DATA_TYPE_UNSPECIFIED ? FindDtype(dtype) : nullptr;
}

std::vector<int64_t> ContiguousStrides(std::span<const int64_t> shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    // What wraps around belongs to a tensor without elements, or to one that is refused for its size.
    (void)__builtin_mul_overflow(stride, std::max<int64_t>(shape[i], 1), &stride);
  }
  return strides;
}

// a * b + c, or nothing past 2^63.
bool MultiplyAdd(int64_t a, int64_t b, int64_t* c) {
  int64_t product = 0;
  return !__builtin_mul_overflow(a, b, &product) && !__builtin_add_overflow(product, *c, c);
}

std::span<const int64_t> ToSpan(const google::protobuf::RepeatedField<int64_t>& field) {
  return {field.data(), static_cast<size_t>(field.size())};
}

// Where a row's bytes lie, once its size is known to be right.
absl::Status CheckPlace(const v1::Tensor& row, int64_t element_bytes, std::span<const int64_t> slab_bytes) {
  if (row.slab() < 0 || static_cast<size_t>(row.slab()) >= slab_bytes.size()) {
    return Invalid(row.name(), absl::StrCat("lies in slab ", row.slab(), " of ", slab_bytes.size()));
  }
  const int64_t slab_size = slab_bytes[static_cast<size_t>(row.slab())];
  if (row.offset_bytes() < 0 || row.size_bytes() > slab_size || row.offset_bytes() > slab_size - row.size_bytes()) {
    return Invalid(row.name(), absl::StrCat("takes ", row.size_bytes(), " bytes from offset ", row.offset_bytes(),
                                            " of a slab of ", slab_size));
  }
  const int64_t alignment = row.alias_of().empty() ? kTensorAlignmentBytes : element_bytes;
  if (row.offset_bytes() % alignment == 0) return absl::OkStatus();
  return Invalid(row.name(),
                 absl::StrCat("starts at offset ", row.offset_bytes(), ", which is no multiple of ", alignment));
}

absl::Status CheckRow(const v1::Tensor& row, std::span<const int64_t> slab_bytes) {
  ASSIGN_OR_RETURN(const int64_t size_bytes,
                   PublishedSizeBytes(row.name(), row.dtype(), ToSpan(row.shape()), ToSpan(row.strides())));
  if (row.size_bytes() != size_bytes) {
    return Invalid(row.name(), absl::StrCat("is said to have ", row.size_bytes(),
                                            " bytes; its type, shape and strides make ", size_bytes));
  }
  if (!v1::TensorKind_IsValid(row.kind())) {
    return Invalid(row.name(), absl::StrCat("is of kind ", static_cast<int>(row.kind()), ", which is not known"));
  }
  return CheckPlace(row, FindDtype(row.dtype())->bits / 8, slab_bytes);
}

const v1::Tensor* FindRow(const std::vector<v1::Tensor>& rows, const std::string& name) {
  const auto found = std::lower_bound(rows.begin(), rows.end(), name,
                                      [](const v1::Tensor& row, const std::string& key) { return row.name() < key; });
  return found != rows.end() && found->name() == name ? &*found : nullptr;
}

absl::Status CheckAlias(const v1::Tensor& row, const std::vector<v1::Tensor>& rows) {
  const v1::Tensor* const target = FindRow(rows, row.alias_of());
  if (target == nullptr || !target->alias_of().empty()) {
    return Invalid(row.name(), absl::StrCat("is an alias of ", Quote(row.alias_of()),
                                            target == nullptr ? ", which is not there" : ", which is one itself"));
  }
  const bool is_inside = row.slab() == target->slab() && row.offset_bytes() >= target->offset_bytes() &&
                         row.offset_bytes() + row.size_bytes() <= target->offset_bytes() + target->size_bytes();
  if (is_inside || row.size_bytes() == 0) return absl::OkStatus();
  return Invalid(row.name(), absl::StrCat("is an alias of ", Quote(row.alias_of()), " but does not lie inside it"));
}

absl::Status CheckDisjoint(const std::vector<v1::Tensor>& rows) {
  std::vector<const v1::Tensor*> by_place;
  for (const v1::Tensor& row : rows) {
    if (row.alias_of().empty() && row.size_bytes() > 0) by_place.push_back(&row);
  }
  std::sort(by_place.begin(), by_place.end(), [](const v1::Tensor* a, const v1::Tensor* b) {
    return std::make_pair(a->slab(), a->offset_bytes()) < std::make_pair(b->slab(), b->offset_bytes());
  });
  for (size_t i = 1; i < by_place.size(); ++i) {
    const v1::Tensor& before = *by_place[i - 1];
    const v1::Tensor& row = *by_place[i];
    if (row.slab() != before.slab() || row.offset_bytes() >= before.offset_bytes() + before.size_bytes()) continue;
    return Invalid(row.name(), absl::StrCat("shares bytes with ", Quote(before.name()), " and neither is an alias"));
  }
  return absl::OkStatus();
}

absl::Status Broken(const std::string& field, const std::string& promised, const std::string& found) {
  return MakeError(Reason::kPromiseBroken,
                   absl::StrCat("what is committed is not what was promised: ", field, " is ", found, " where ",
                                promised, " was promised"),
                   {{"field", field}, {"promised", promised}, {"found", found}});
}

}  // namespace

absl::StatusOr<int64_t> PublishedSizeBytes(const std::string& name, v1::DataType dtype, std::span<const int64_t> shape,
                                           std::span<const int64_t> strides) {
  const DtypeInfo* const info = ServableDtype(dtype);
  if (info == nullptr) {
    return Invalid(name, absl::StrCat("has type ", static_cast<int>(dtype),
                                      "; these can be published: ", DtypeNames(DtypeUse::kServable)));
  }
  if (!strides.empty() && strides.size() != shape.size()) {
    return Invalid(name, absl::StrCat("has ", strides.size(), " strides for ", shape.size(), " dimensions"));
  }
  const auto is_negative = [](int64_t value) { return value < 0; };
  if (std::any_of(shape.begin(), shape.end(), is_negative) ||
      std::any_of(strides.begin(), strides.end(), is_negative)) {
    return Invalid(name, absl::StrCat("has a negative dimension or stride: shape ", absl::StrJoin(shape, "x"),
                                      ", strides ", absl::StrJoin(strides, ",")));
  }
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  int64_t count = 1;
  bool fits = true;
  for (const int64_t size : shape) fits = fits && !__builtin_mul_overflow(count, size, &count);
  int64_t all_bytes = 0;
  fits = fits && !__builtin_mul_overflow(count, info->bits / 8, &all_bytes);
  int64_t last_element = strides.empty() ? count - 1 : 0;
  for (size_t i = 0; i < strides.size(); ++i) fits = fits && MultiplyAdd(shape[i] - 1, strides[i], &last_element);
  int64_t size_bytes = info->bits / 8;
  if (!fits || last_element == kMaxBytes || !MultiplyAdd(last_element, info->bits / 8, &size_bytes)) {
    return Invalid(name, "has more than 2^63 bytes");
  }
  return size_bytes;
}

absl::StatusOr<std::vector<v1::Tensor>> CheckPublishedTensors(std::vector<v1::Tensor> rows,
                                                              std::span<const int64_t> slab_bytes) {
  NormalizePublishedTensors(rows);
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].name().empty()) return Invalid("", "has no name");
    if (i > 0 && rows[i].name() == rows[i - 1].name()) return Invalid(rows[i].name(), "is there twice");
    RETURN_IF_ERROR(CheckRow(rows[i], slab_bytes));
  }
  for (v1::Tensor& row : rows) {
    if (!row.alias_of().empty()) RETURN_IF_ERROR(CheckAlias(row, rows));
    row.clear_digest();
  }
  RETURN_IF_ERROR(CheckDisjoint(rows));
  return rows;
}

void NormalizePublishedTensors(std::vector<v1::Tensor>& rows) {
  std::sort(rows.begin(), rows.end(), [](const v1::Tensor& a, const v1::Tensor& b) { return a.name() < b.name(); });
  for (v1::Tensor& row : rows) {
    const std::vector<int64_t> contiguous = ContiguousStrides(ToSpan(row.shape()));
    if (std::equal(row.strides().begin(), row.strides().end(), contiguous.begin(), contiguous.end())) {
      row.clear_strides();
    }
  }
}

int64_t PublishedTotalBytes(std::span<const v1::Tensor> rows) {
  int64_t bytes = 0;
  for (const v1::Tensor& row : rows) bytes += row.alias_of().empty() ? row.size_bytes() : 0;
  return bytes;
}

std::string PublishedLayoutText(std::span<const v1::Tensor> rows) {
  std::string text;
  for (const v1::Tensor& row : rows) {
    absl::StrAppend(&text, row.name().size(), ":", row.name(), "\t", ToAbsl(FindDtype(row.dtype())->name), "\t",
                    absl::StrJoin(row.shape(), ","), "\t", absl::StrJoin(row.strides(), ","), "\t",
                    row.alias_of().empty() ? "" : absl::StrCat(row.alias_of().size(), ":", row.alias_of()), "\n");
  }
  return text;
}

std::string PublishedLayoutSha256(std::span<const v1::Tensor> rows) { return Sha256Bytes(PublishedLayoutText(rows)); }

absl::Status CheckPromise(const v1::PublishPromise& promise, std::span<const v1::Tensor> rows) {
  if (promise.tensor_count() != static_cast<int64_t>(rows.size())) {
    return Broken("tensor_count", absl::StrCat(promise.tensor_count()), absl::StrCat(rows.size()));
  }
  if (const int64_t size_bytes = PublishedTotalBytes(rows); promise.size_bytes() != size_bytes) {
    return Broken("size_bytes", absl::StrCat(promise.size_bytes()), absl::StrCat(size_bytes));
  }
  if (promise.layout_sha256().empty()) return absl::OkStatus();
  if (const std::string found = PublishedLayoutSha256(rows); promise.layout_sha256() != found) {
    return Broken("layout_sha256", absl::BytesToHexString(promise.layout_sha256()), absl::BytesToHexString(found));
  }
  return absl::OkStatus();
}

}  // namespace weightbroker
