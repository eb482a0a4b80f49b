#include "common/checkpoint/dtype.h"

namespace weightbroker {
namespace {

// Every element type of the safetensors format, in its own order, which is by alignment.
constexpr DtypeInfo kDtypes[] = {
    {"BOOL", 8, v1::DATA_TYPE_BOOL},
    {"F4", 4, v1::DATA_TYPE_UNSPECIFIED},
    {"F6_E2M3", 6, v1::DATA_TYPE_UNSPECIFIED},
    {"F6_E3M2", 6, v1::DATA_TYPE_UNSPECIFIED},
    {"U8", 8, v1::DATA_TYPE_U8},
    {"I8", 8, v1::DATA_TYPE_I8},
    {"F8_E5M2", 8, v1::DATA_TYPE_UNSPECIFIED},
    {"F8_E4M3", 8, v1::DATA_TYPE_F8_E4M3},
    {"F8_E8M0", 8, v1::DATA_TYPE_UNSPECIFIED},
    {"F8_E4M3FNUZ", 8, v1::DATA_TYPE_UNSPECIFIED},
    {"F8_E5M2FNUZ", 8, v1::DATA_TYPE_UNSPECIFIED},
    {"I16", 16, v1::DATA_TYPE_I16},
    {"U16", 16, v1::DATA_TYPE_U16},
    {"F16", 16, v1::DATA_TYPE_F16},
    {"BF16", 16, v1::DATA_TYPE_BF16},
    {"I32", 32, v1::DATA_TYPE_I32},
    {"U32", 32, v1::DATA_TYPE_U32},
    {"F32", 32, v1::DATA_TYPE_F32},
    {"C64", 64, v1::DATA_TYPE_UNSPECIFIED},
    {"F64", 64, v1::DATA_TYPE_F64},
    {"I64", 64, v1::DATA_TYPE_I64},
    {"U64", 64, v1::DATA_TYPE_U64},
};

}  // namespace

const DtypeInfo* FindDtype(std::string_view name) {
  for (const DtypeInfo& row : kDtypes) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

const DtypeInfo* FindDtype(v1::DataType dtype) {
  if (dtype == v1::DATA_TYPE_UNSPECIFIED) return nullptr;
  for (const DtypeInfo& row : kDtypes) {
    if (row.proto == dtype) return &row;
  }
  return nullptr;
}

std::string DtypeNames(DtypeUse use) {
  std::string names;
  for (const DtypeInfo& row : kDtypes) {
    if (use == DtypeUse::kServable && row.proto == v1::DATA_TYPE_UNSPECIFIED) continue;
    if (!names.empty()) names += ", ";
    names += row.name;
  }
  return names;
}

}  // namespace weightbroker
