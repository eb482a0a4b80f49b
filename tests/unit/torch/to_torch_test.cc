#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/unit/torch/load_weights.h"
#include "weightbroker/torch.h"

namespace weightbroker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::weightbroker::testing::CheckpointBuilder;
using ::weightbroker::testing::LoadWeights;
using ::weightbroker::testing::TensorBytes;

std::string BytesOf(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

at::Tensor Get(const MappedWeights& weights, const std::string& name) {
  auto tensor = ToTorch(weights, name);
  EXPECT_TRUE(tensor.ok()) << tensor.status().ToString();
  return tensor.ok() ? *tensor : at::Tensor();
}

TEST(ToTorch, GivesEveryServableTypeAtItsOwnAddress) {
  const std::vector<std::pair<std::string, at::ScalarType>> types = {
      {"BOOL", at::kBool},     {"U8", at::kByte},   {"I8", at::kChar},    {"U16", at::kUInt16}, {"I16", at::kShort},
      {"U32", at::kUInt32},    {"I32", at::kInt},   {"U64", at::kUInt64}, {"I64", at::kLong},   {"F16", at::kHalf},
      {"BF16", at::kBFloat16}, {"F32", at::kFloat}, {"F64", at::kDouble}};
  CheckpointBuilder builder;
  for (const auto& [name, type] : types) builder.Tensor(name, name, {3, 5});
  const MappedWeights weights = LoadWeights(builder);

  for (const auto& [name, type] : types) {
    SCOPED_TRACE(name);
    const at::Tensor tensor = Get(weights, name);
    EXPECT_EQ(tensor.scalar_type(), type);
    EXPECT_THAT(tensor.sizes(), ElementsAre(3, 5));
    EXPECT_THAT(tensor.strides(), ElementsAre(5, 1));
    EXPECT_EQ(tensor.const_data_ptr(), weights.Find(name)->data) << "copied";
    EXPECT_EQ(BytesOf(tensor), TensorBytes(name, 15 * tensor.element_size()));
    EXPECT_TRUE(tensor.device().is_cpu());
    EXPECT_FALSE(tensor.requires_grad());
  }
}

TEST(ToTorch, GivesEightBitFloatsAndTheirScales) {
  const MappedWeights weights =
      LoadWeights(CheckpointBuilder().BlockFp8("l.weight", {256, 128}).Config(testing::kBlockFp8Config));

  const at::Tensor weight = Get(weights, "l.weight");
  const at::Tensor scales = Get(weights, "l.weight_scale_inv");

  EXPECT_EQ(weight.scalar_type(), at::kFloat8_e4m3fn);
  EXPECT_THAT(weight.sizes(), ElementsAre(256, 128));
  EXPECT_EQ(BytesOf(weight), TensorBytes("l.weight", 256 * 128));
  EXPECT_THAT(scales.sizes(), ElementsAre(2, 1));
  // 0x38 is 1.0, whatever torch makes of the rest.
  const at::Tensor ones = weight.view(at::kByte) == 0x38;
  EXPECT_TRUE(at::equal(weight.to(at::kFloat) == 1.0F, ones));
}

TEST(ToTorch, GivesScalarsAndEmptyTensorsTheirShapes) {
  const MappedWeights weights =
      LoadWeights(CheckpointBuilder().Tensor("scalar", "F32", {}).Tensor("empty", "BF16", {4, 0, 2}));

  const at::Tensor scalar = Get(weights, "scalar");
  const at::Tensor empty = Get(weights, "empty");

  EXPECT_EQ(scalar.dim(), 0);
  EXPECT_EQ(BytesOf(scalar), TensorBytes("scalar", 4));
  EXPECT_THAT(empty.sizes(), ElementsAre(4, 0, 2));
  EXPECT_EQ(empty.numel(), 0);
  EXPECT_TRUE(at::equal(empty, at::empty({4, 0, 2}, at::kBFloat16)));
}

TEST(ToTorch, HasTheStridesThatTheLibraryStates) {
  const MappedWeights weights = LoadWeights(
      CheckpointBuilder().Tensor("a", "F32", {2, 3, 4}).Tensor("b", "F32", {1, 5, 1}).Tensor("c", "F32", {3, 0, 2}));

  for (const Tensor& tensor : weights) {
    EXPECT_EQ(Get(weights, std::string(tensor.name)).strides().vec(), tensor.Strides()) << tensor.name;
  }
}

TEST(ToTorch, KeepsStridesThatAreStated) {
  const MappedWeights weights = LoadWeights(CheckpointBuilder().Tensor("w", "F32", {4, 3}));
  const int64_t shape[] = {3, 2};
  const int64_t strides[] = {1, 6};
  Tensor transposed = *weights.Find("w");  // every other row, as columns
  transposed.shape = Dimensions(shape, 2);
  transposed.stated_strides = Dimensions(strides, 2);

  const auto tensor = ToTorch(weights, transposed);

  ASSERT_TRUE(tensor.ok()) << tensor.status().ToString();
  EXPECT_THAT(tensor->strides(), ElementsAre(1, 6));
  const at::Tensor expected = Get(weights, "w").index_select(0, at::tensor({0, 2})).t();
  EXPECT_TRUE(at::equal(at::nan_to_num(*tensor), at::nan_to_num(expected)));
}

TEST(ToTorch, SharesStorageBetweenAnAliasAndItsTensor) {
  const MappedWeights weights =
      LoadWeights(CheckpointBuilder().Tensor("kept", "F32", {2, 2}).Metadata("removed", "kept"));

  const auto all = ToTorch(weights);

  ASSERT_TRUE(all.ok()) << all.status().ToString();
  ASSERT_EQ(all->size(), 2U);  // "kept", "removed"
  EXPECT_TRUE((*all)[0].is_alias_of((*all)[1]));
  EXPECT_EQ((*all)[0].const_data_ptr(), (*all)[1].const_data_ptr());
  EXPECT_TRUE(at::equal((*all)[0], Get(weights, "removed")));
}

TEST(ToTorch, GivesAllTensorsInTheOrderOfTheManifest) {
  const MappedWeights weights =
      LoadWeights(CheckpointBuilder().Tensor("b", "F32", {2}).Tensor("a", "BF16", {3}).Tensor("c", "I64", {1}));

  const auto all = ToTorch(weights);

  ASSERT_TRUE(all.ok()) << all.status().ToString();
  ASSERT_EQ(all->size(), weights.tensors().size());
  for (size_t i = 0; i < all->size(); ++i) EXPECT_EQ((*all)[i].const_data_ptr(), weights.tensors()[i].data);
}

TEST(ToTorch, KeepsTheMappingForAsLongAsATensorLives) {
  at::Tensor tensor;
  {
    const MappedWeights weights = LoadWeights(CheckpointBuilder().Tensor("w", "U8", {100'000}));
    tensor = Get(weights, "w").slice(0, 50'000);  // a view counts as well
  }

  EXPECT_EQ(BytesOf(tensor.contiguous()), TensorBytes("w", 100'000).substr(50'000));
}

TEST(ToTorch, LetsTheMappingGoWithTheLastTensor) {
  std::weak_ptr<const void> mapping;
  std::optional<at::Tensor> tensor;
  {
    const MappedWeights weights = LoadWeights(CheckpointBuilder().Tensor("w", "U8", {10}));
    mapping = weights.KeepAlive();
    tensor = Get(weights, "w");
  }
  EXPECT_FALSE(mapping.expired());

  tensor.reset();

  EXPECT_TRUE(mapping.expired());
}

TEST(ToTorch, SaysWhichTensorThereIsNot) {
  const MappedWeights weights = LoadWeights(CheckpointBuilder().Tensor("w", "U8", {10}));

  const auto tensor = ToTorch(weights, "v");

  ASSERT_FALSE(tensor.ok());
  EXPECT_EQ(tensor.status().reason(), "TENSOR_UNKNOWN");
  EXPECT_EQ(tensor.status().code(), StatusCode::kNotFound);
  EXPECT_THAT(tensor.status().message(), HasSubstr("\"v\""));
}

TEST(ToTorch, RefusesATypeThatTorchDoesNotHave) {
  const MappedWeights weights = LoadWeights(CheckpointBuilder().Tensor("w", "U8", {10}));
  Tensor future = *weights.Find("w");
  future.dtype = static_cast<DataType>(1000);

  const auto tensor = ToTorch(weights, future);

  ASSERT_FALSE(tensor.ok());
  EXPECT_EQ(tensor.status().reason(), "DTYPE_UNSUPPORTED");
}

}  // namespace
}  // namespace weightbroker
