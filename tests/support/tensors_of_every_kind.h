// Tensors of every kind that an engine can publish, and what must come back of them.
//
//   const TensorsOfEveryKind tensors;
//   client.AttachOrPublish(spec, [&](Publisher& publisher) { return tensors.Put(publisher); });
//   tensors.ExpectAll([&](const std::string& name) { return weights->Find(name); }, BytesOf);
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/support/checkpoint_builder.h"
#include "weightbroker/publisher.h"
#include "weightbroker/tensor.h"

namespace weightbroker::testing {

inline TensorToPublish Described(const std::string& name, DataType dtype, std::vector<int64_t> shape) {
  TensorToPublish tensor;
  tensor.name = name;
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  return tensor;
}

// Of a tensor in memory that this process can read: the host's, or a GPU's that is made of it.
inline std::string BytesOf(const Tensor& tensor) {
  return {reinterpret_cast<const char*>(tensor.data), static_cast<size_t>(tensor.size_bytes)};
}

class TensorsOfEveryKind {
 public:
  static constexpr size_t kCount = 9;

  Status Put(Publisher& publisher) const {
    TensorToPublish matrix = Described("matrix", DataType::kBF16, {6, 4});
    matrix.metadata = {{"note", "a matrix"}, {"unknown.to.everybody", std::string("\x01 \xc3\xa9", 4)}, {"empty", ""}};
    Status status = publisher.Add(matrix, matrix_.data());
    TensorToPublish transposed = Alias("transposed", {4, 6});  // the same memory, seen sideways
    transposed.strides = {1, 4};
    if (status.ok()) status = publisher.AddAlias(transposed);
    if (status.ok()) status = publisher.AddAlias(Alias("rows_2_to_3", {2, 4}), 2 * 4 * 2);
    // Starts where a GPU's digests cannot.
    if (status.ok()) status = publisher.AddAlias(Alias("from_the_fourth_on", {3}), 6);
    TensorToPublish columns = Described("every_other_column", DataType::kBF16, {6, 2});  // with what lies between
    columns.strides = {4, 2};
    if (status.ok()) status = publisher.Add(columns, matrix_.data());
    TensorToPublish buffer = Described("fp8", DataType::kF8E4M3, {2, 16});
    buffer.kind = TensorKind::kBuffer;
    if (status.ok()) status = publisher.Add(buffer, fp8_.data());
    TensorToPublish mask = Described("mask", DataType::kBool, {4});
    mask.kind = TensorKind::kNonPersistentBuffer;
    if (status.ok()) status = publisher.Add(mask, mask_.data());
    if (status.ok()) status = publisher.Add(Described("scalar", DataType::kF32, {}), &scalar_);
    if (status.ok()) status = publisher.Add(Described("nothing", DataType::kF32, {3, 0, 2}), nullptr);
    return status;
  }

  // `find` gives a tensor as whoever attaches sees it, `read` the bytes of one.
  void ExpectAll(const std::function<const Tensor*(const std::string& name)>& find,
                 const std::function<std::string(const Tensor&)>& read) const {
    using ::testing::ElementsAre;
    using ::testing::Pair;
    for (const char* name : {"matrix", "transposed", "rows_2_to_3", "from_the_fourth_on", "every_other_column", "fp8",
                             "mask", "scalar", "nothing"}) {
      ASSERT_NE(find(name), nullptr) << name;
    }
    const Tensor& whole = *find("matrix");
    EXPECT_EQ(read(whole), matrix_);
    EXPECT_EQ(whole.kind, TensorKind::kParameter);
    EXPECT_THAT(whole.metadata, ElementsAre(Pair("empty", ""), Pair("note", "a matrix"),
                                            Pair("unknown.to.everybody", std::string_view("\x01 \xc3\xa9", 4))));
    const Tensor& transposed = *find("transposed");
    EXPECT_EQ(transposed.data, whole.data);
    EXPECT_THAT(transposed.Strides(), ElementsAre(1, 4));
    EXPECT_THAT(std::vector<int64_t>(transposed.shape.begin(), transposed.shape.end()), ElementsAre(4, 6));
    EXPECT_EQ(transposed.alias_of, "matrix");
    EXPECT_EQ(find("rows_2_to_3")->data, whole.data + 16);
    EXPECT_EQ(read(*find("rows_2_to_3")), matrix_.substr(16, 16));
    EXPECT_EQ(read(*find("from_the_fourth_on")), matrix_.substr(6, 6));
    const Tensor& columns = *find("every_other_column");
    EXPECT_THAT(columns.Strides(), ElementsAre(4, 2));
    EXPECT_EQ(read(columns), matrix_.substr(0, (5 * 4 + 2 + 1) * 2));
    EXPECT_TRUE(columns.alias_of.empty());
    EXPECT_EQ(find("fp8")->dtype, DataType::kF8E4M3);
    EXPECT_EQ(find("fp8")->kind, TensorKind::kBuffer);
    EXPECT_EQ(read(*find("fp8")), fp8_);
    EXPECT_EQ(find("mask")->kind, TensorKind::kNonPersistentBuffer);
    EXPECT_EQ(read(*find("mask")), mask_);
    EXPECT_TRUE(find("scalar")->shape.empty());
    EXPECT_EQ(read(*find("scalar")), std::string(reinterpret_cast<const char*>(&scalar_), sizeof(scalar_)));
    EXPECT_EQ(find("nothing")->size_bytes, 0);
    EXPECT_THAT(find("nothing")->Strides(), ElementsAre(2, 2, 1));
  }

 private:
  static TensorToPublish Alias(const std::string& name, std::vector<int64_t> shape) {
    TensorToPublish alias = Described(name, DataType::kBF16, std::move(shape));
    alias.alias_of = "matrix";
    return alias;
  }

  const std::string matrix_ = TensorBytes("matrix", 6 * 4 * 2);
  const std::string fp8_ = TensorBytes("fp8", 32);
  const std::string mask_ = std::string("\x01\x00\x01\x01", 4);
  const float scalar_ = 2.5F;
};

}  // namespace weightbroker::testing
