// What an engine may publish: the rules for the rows that it commits, and the hash of what it may promise beforehand.
//
//   ASSIGN_OR_RETURN(auto rows, CheckPublishedTensors(std::move(rows), slab_bytes));   // MANIFEST_INVALID: the tensor
//   if (PublishedLayoutSha256(rows) != promise.layout_sha256()) ...
//
// docs/publish.md has the rules for people. Thread-safe: all functions are pure.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker {

// The bytes from the first element of such a tensor to the last, 0 if it has none; `strides` are in elements, empty for
// contiguous ones. MANIFEST_INVALID for a type that cannot be served, a negative dimension or stride, another number of
// strides than of dimensions, and for more than 2^63 bytes. Messages say "tensor `name`".
absl::StatusOr<int64_t> PublishedSizeBytes(const std::string& name, v1::DataType dtype, std::span<const int64_t> shape,
                                           std::span<const int64_t> strides);

// The rows sorted by name, without digests and without strides that say no more than that a tensor is contiguous.
// MANIFEST_INVALID naming the first tensor for which this is not so:
//   every name is there once and not empty, every size is the one of type, shape and strides, every tensor lies inside
//   its slab; those that are no alias start at a multiple of kTensorAlignmentBytes and share no byte with each other;
//   an alias names one that is none, and lies inside it, at a multiple of its element's size.
absl::StatusOr<std::vector<v1::Tensor>> CheckPublishedTensors(std::vector<v1::Tensor> rows,
                                                              std::span<const int64_t> slab_bytes);

// Sorts rows by name, and takes away strides that say no more than that a tensor is contiguous.
void NormalizePublishedTensors(std::vector<v1::Tensor>& rows);

// The length of all tensors together, aliases not counted.
int64_t PublishedTotalBytes(std::span<const v1::Tensor> rows);

// A line for each tensor with its name, type, shape, strides and what it is an alias of: see docs/publish.md. `rows`
// are as CheckPublishedTensors gives them.
std::string PublishedLayoutText(std::span<const v1::Tensor> rows);

// The SHA-256, 32 bytes, over that.
std::string PublishedLayoutSha256(std::span<const v1::Tensor> rows);

// PROMISE_BROKEN naming what differs, with both values.
absl::Status CheckPromise(const v1::PublishPromise& promise, std::span<const v1::Tensor> rows);

}  // namespace weightbroker
