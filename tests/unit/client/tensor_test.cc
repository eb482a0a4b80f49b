#include "weightbroker/tensor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "weightbroker/v1/types.pb.h"

namespace weightbroker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<int64_t> StridesOf(const std::vector<int64_t>& shape) {
  Tensor tensor;
  tensor.shape = Dimensions(shape.data(), shape.size());
  return tensor.Strides();
}

TEST(Tensor, HasTheStridesThatTorchGivesAContiguousOne) {
  EXPECT_THAT(StridesOf({2, 3, 4}), ElementsAre(12, 4, 1));
  EXPECT_THAT(StridesOf({5}), ElementsAre(1));
  EXPECT_THAT(StridesOf({}), IsEmpty());
  EXPECT_THAT(StridesOf({3, 0, 2}), ElementsAre(2, 2, 1));  // torch.empty(3, 0, 2).stride()
}

TEST(DataType, HasANameAndALengthForEachThatTheApiKnows) {
  for (int number = v1::DataType_MIN + 1; number <= v1::DataType_MAX; ++number) {
    const auto dtype = static_cast<DataType>(number);
    EXPECT_EQ(v1::DataType_Name(static_cast<v1::DataType>(number)), std::string("DATA_TYPE_") + DataTypeName(dtype));
    EXPECT_GT(DataTypeBytes(dtype), 0);
  }
}

TEST(DataType, HasNoLengthForNumbersThatAreNone) {
  EXPECT_EQ(DataTypeBytes(static_cast<DataType>(v1::DataType_MAX + 1)), 0);
  EXPECT_EQ(DataTypeBytes(static_cast<DataType>(-1)), 0);
}

}  // namespace
}  // namespace weightbroker
