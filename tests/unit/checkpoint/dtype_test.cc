#include "common/checkpoint/dtype.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(Dtype, KnowsEveryTypeOfTheFormatByItsBits) {
  const std::pair<const char*, int> expected[] = {
      {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
      {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
      {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
      {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64}};
  for (const auto& [name, bits] : expected) {
    ASSERT_NE(FindDtype(name), nullptr) << name;
    EXPECT_EQ(FindDtype(name)->bits, bits) << name;
  }
}

TEST(Dtype, KnowsNoOtherSpelling) {
  for (const char* name : {"", "bf16", "BF16 ", "F8_E4M3FN", "float32", "I4"})
    EXPECT_EQ(FindDtype(name), nullptr) << name;
}

TEST(Dtype, HasARowForEveryTypeOfTheApiAndNoneForUnspecified) {
  for (int value = v1::DataType_MIN; value <= v1::DataType_MAX; ++value) {
    const auto type = static_cast<v1::DataType>(value);
    const DtypeInfo* row = FindDtype(type);
    ASSERT_EQ(row == nullptr, type == v1::DATA_TYPE_UNSPECIFIED) << value;
    if (row == nullptr) continue;
    EXPECT_EQ("DATA_TYPE_" + std::string(row->name), v1::DataType_Name(type));
  }
}

TEST(Dtype, ListsWhatCanBeServed) {
  EXPECT_THAT(DtypeNames(DtypeUse::kServable), HasSubstr("F8_E4M3, "));
  EXPECT_THAT(DtypeNames(DtypeUse::kServable), Not(HasSubstr("F8_E5M2")));
  EXPECT_THAT(DtypeNames(DtypeUse::kAny), HasSubstr("F8_E5M2"));
}

}  // namespace
}  // namespace weightbroker
