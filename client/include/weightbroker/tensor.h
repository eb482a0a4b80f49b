// One tensor of a mapped shard: a view, valid for as long as the MappedWeights it came from.
//
//   const weightbroker::Tensor* weight = weights.Find("model.embed_tokens.weight");
//   if (weight == nullptr) ...                               // no such name
//   Use(weight->data, weight->dtype, weight->shape, weight->Strides());
//
// The memory is read-only. In host memory a write ends the process with SIGSEGV; in GPU memory of kind CUDA_VMM_FD it
// ends the process's CUDA context with an illegal access; GPU memory of kind CUDA_IPC cannot be protected. Immutable,
// so thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "weightbroker/export.h"

namespace weightbroker {

// Element types, as the safetensors format spells them, with the numbers of weightbroker.v1.DataType.
enum class DataType : int32_t {
  kUnspecified = 0,
  kBool = 1,
  kU8 = 2,
  kI8 = 3,
  kU16 = 4,
  kI16 = 5,
  kU32 = 6,
  kI32 = 7,
  kU64 = 8,
  kI64 = 9,
  kF8E4M3 = 10,
  kF16 = 11,
  kBF16 = 12,
  kF32 = 13,
  kF64 = 14,
};

// Its name in a safetensors header, for instance "BF16"; "UNSPECIFIED" for a number that is none.
WEIGHTBROKER_EXPORT const char* DataTypeName(DataType dtype);
// The length of one element; 0 for a number that is none.
WEIGHTBROKER_EXPORT int64_t DataTypeBytes(DataType dtype);

// The dimensions of a tensor, outermost first; empty for a scalar. A view, as the tensor is.
class Dimensions {
 public:
  using value_type = int64_t;
  using const_iterator = const int64_t*;

  Dimensions() = default;
  Dimensions(const int64_t* first, size_t count) : first_(first), count_(count) {}

  size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }
  int64_t operator[](size_t index) const { return first_[index]; }
  const int64_t* begin() const { return first_; }
  const int64_t* end() const { return first_ + count_; }
  const int64_t* data() const { return first_; }

 private:
  const int64_t* first_ = nullptr;
  size_t count_ = 0;
};

using TensorDigest = std::array<unsigned char, 16>;

// What a tensor is to the module that it belongs to, with the numbers of weightbroker.v1.TensorKind.
enum class TensorKind : int32_t {
  kUnspecified = 0,  // nobody said: it comes from a checkpoint
  kParameter = 1,
  kBuffer = 2,
  kNonPersistentBuffer = 3,  // one that the module's state does not list
};

// What the engine that published a tensor wants to be known of it: a name and a value, as it gave them.
using TensorNote = std::pair<std::string_view, std::string_view>;

struct WEIGHTBROKER_EXPORT Tensor {
  std::string_view name;
  DataType dtype = DataType::kUnspecified;
  Dimensions shape;
  // Aligned to 256 bytes, but for a part of another tensor. An address of the device that the weights lie on
  // (MappedWeights::device): what lies on a GPU cannot be read by the host. Null if size_bytes is 0.
  const std::byte* data = nullptr;
  int64_t size_bytes = 0;     // from the first element to the last; 0 for a tensor with a zero dimension
  std::string_view alias_of;  // the tensor whose memory, or a part of it, this one shares; empty otherwise
  TensorDigest digest = {};   // wbd1, see docs/manifest-format.md

  Dimensions stated_strides;  // in elements; empty for elements that are contiguous in row-major order
  TensorKind kind = TensorKind::kUnspecified;
  std::vector<TensorNote> metadata;  // sorted by name; only of published tensors

  // The distance between neighbours along each dimension, in elements, as torch counts strides.
  std::vector<int64_t> Strides() const;
};

}  // namespace weightbroker
