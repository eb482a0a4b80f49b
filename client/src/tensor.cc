#include "weightbroker/tensor.h"

#include <iterator>

namespace weightbroker {
namespace {

struct DataTypeRow {
  const char* name;
  int64_t bytes;
};

// By the number of weightbroker.v1.DataType.
constexpr DataTypeRow kDataTypes[] = {{"UNSPECIFIED", 0}, {"BOOL", 1}, {"U8", 1},   {"I8", 1},  {"U16", 2},
                                      {"I16", 2},         {"U32", 4},  {"I32", 4},  {"U64", 8}, {"I64", 8},
                                      {"F8_E4M3", 1},     {"F16", 2},  {"BF16", 2}, {"F32", 4}, {"F64", 8}};

const DataTypeRow& RowOf(DataType dtype) {
  const auto index = static_cast<size_t>(dtype);
  return kDataTypes[index < std::size(kDataTypes) ? index : 0];
}

}  // namespace

const char* DataTypeName(DataType dtype) { return RowOf(dtype).name; }

int64_t DataTypeBytes(DataType dtype) { return RowOf(dtype).bytes; }

std::vector<int64_t> Tensor::Strides() const {
  if (!stated_strides.empty()) return {stated_strides.begin(), stated_strides.end()};
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    // As torch does: a zero dimension counts as one. What wraps around belongs to a tensor without elements.
    (void)__builtin_mul_overflow(stride, shape[i] > 0 ? shape[i] : 1, &stride);
  }
  return strides;
}

}  // namespace weightbroker
