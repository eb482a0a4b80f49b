// Element types, as the safetensors format spells them. Every type of the format is known by its bits; those with
// `proto != UNSPECIFIED` can be served.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "weightbroker/v1/types.pb.h"

namespace weightbroker {

struct DtypeInfo {
  std::string_view name;  // as in a safetensors header, e.g. "BF16"
  int bits;
  v1::DataType proto;  // DATA_TYPE_UNSPECIFIED if it cannot be served
};

// The row for `name`, or nullptr. The pointer stays valid for the life of the process.
const DtypeInfo* FindDtype(std::string_view name);

// The row for a type that can be served; never nullptr for a valid one.
const DtypeInfo* FindDtype(v1::DataType dtype);

// The names of all rows, or of those that can be served, separated by ", ", for messages.
enum class DtypeUse { kAny, kServable };
std::string DtypeNames(DtypeUse use);

}  // namespace weightbroker
