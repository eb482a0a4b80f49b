// What an engine may publish and what not, one rule at a time.

#include "common/publish/published_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::HasMetadata;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;

constexpr int64_t kSlabs[] = {4096, 1024};

// 4 x 3 BF16 at the start of slab 0.
v1::Tensor Row(const std::string& name = "w") {
  v1::Tensor row;
  row.set_name(name);
  row.set_dtype(v1::DATA_TYPE_BF16);
  row.add_shape(4);
  row.add_shape(3);
  row.set_size_bytes(24);
  return row;
}

absl::Status CheckOne(const std::function<void(v1::Tensor&)>& change) {
  v1::Tensor row = Row();
  change(row);
  return CheckPublishedTensors({row}, kSlabs).status();
}

void SetStrides(v1::Tensor& row, const std::vector<int64_t>& strides) {
  row.mutable_strides()->Assign(strides.begin(), strides.end());
}

TEST(PublishedTensors, AreSortedAndLoseWhatTheServiceSaysItself) {
  v1::Tensor second = Row("b");
  second.set_digest("made up");
  v1::Tensor first = Row("a");
  first.set_offset_bytes(256);
  SetStrides(first, {3, 1});
  const auto rows = CheckPublishedTensors({second, first}, kSlabs);
  ASSERT_THAT(rows, IsOk());
  EXPECT_EQ((*rows)[0].name(), "a");
  EXPECT_TRUE((*rows)[0].strides().empty()) << "they say no more than that it is contiguous";
  EXPECT_TRUE((*rows)[1].digest().empty());
}

TEST(PublishedTensors, HaveTheBytesFromTheFirstElementToTheLast) {
  const auto bytes = [](const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
    return PublishedSizeBytes("w", v1::DATA_TYPE_F32, shape, strides).value_or(-1);
  };
  EXPECT_EQ(bytes({}, {}), 4);
  EXPECT_EQ(bytes({2, 3}, {}), 24);
  EXPECT_EQ(bytes({3, 2}, {1, 3}), 24);   // transposed
  EXPECT_EQ(bytes({2, 2}, {10, 4}), 60);  // with gaps
  EXPECT_EQ(bytes({5, 3}, {0, 1}), 12);   // expanded
  EXPECT_EQ(bytes({5, 0}, {7, 7}), 0);
}

TEST(PublishedTensors, AreRefusedForWhatIsWrongWithOne) {
  const std::pair<std::function<void(v1::Tensor&)>, std::string> wrong[] = {
      {[](v1::Tensor& row) { row.clear_name(); }, "has no name"},
      {[](v1::Tensor& row) { row.set_dtype(v1::DATA_TYPE_UNSPECIFIED); }, "has type 0"},
      {[](v1::Tensor& row) { row.set_dtype(static_cast<v1::DataType>(99)); }, "has type 99"},
      {[](v1::Tensor& row) { row.set_shape(0, -4); }, "negative"},
      {[](v1::Tensor& row) {
         SetStrides(row, {3, -1});
       },
       "negative"},
      {[](v1::Tensor& row) { SetStrides(row, {3}); }, "1 strides for 2 dimensions"},
      {[](v1::Tensor& row) { row.set_shape(0, int64_t{1} << 62); }, "2^63"},
      {[](v1::Tensor& row) {
         SetStrides(row, {int64_t{1} << 62, 1});
       },
       "2^63"},
      {[](v1::Tensor& row) { row.set_size_bytes(25); }, "25 bytes; its type, shape and strides make 24"},
      {[](v1::Tensor& row) { row.set_slab(2); }, "slab 2 of 2"},
      {[](v1::Tensor& row) { row.set_slab(-1); }, "slab -1"},
      {[](v1::Tensor& row) { row.set_offset_bytes(4096); }, "of a slab of 4096"},
      {[](v1::Tensor& row) { row.set_offset_bytes(-256); }, "of a slab of 4096"},
      {[](v1::Tensor& row) { row.set_offset_bytes(128); }, "no multiple of 256"},
      {[](v1::Tensor& row) { row.set_kind(static_cast<v1::TensorKind>(9)); }, "kind 9"},
      {[](v1::Tensor& row) { row.set_alias_of("nobody"); }, "which is not there"},
      {[](v1::Tensor& row) { row.set_alias_of("w"); }, "which is one itself"},
  };
  for (const auto& [change, message] : wrong) {
    EXPECT_THAT(CheckOne(change), StatusIs(Reason::kManifestInvalid, HasSubstr(message)));
  }
  EXPECT_THAT(CheckOne([](v1::Tensor&) {}), IsOk());
}

TEST(PublishedTensors, HaveNamesOfTheirOwn) {
  v1::Tensor again = Row();
  again.set_offset_bytes(256);
  EXPECT_THAT(CheckPublishedTensors({Row(), again}, kSlabs),
              AllOf(StatusIs(Reason::kManifestInvalid, HasSubstr("there twice")), HasMetadata("tensor", "w")));
}

TEST(PublishedTensors, ShareNoBytesUnlessOneIsAnAlias) {
  v1::Tensor other = Row("v");
  EXPECT_THAT(CheckPublishedTensors({Row(), other}, kSlabs), StatusIs(Reason::kManifestInvalid, HasSubstr("shares")));
  other.set_slab(1);
  EXPECT_THAT(CheckPublishedTensors({Row(), other}, kSlabs), IsOk());
  other.set_slab(0);
  other.set_alias_of("w");
  EXPECT_THAT(CheckPublishedTensors({Row(), other}, kSlabs), IsOk());
}

TEST(PublishedTensors, MayBePartsOfOneThatIsNoAlias) {
  v1::Tensor part = Row("part");
  part.set_alias_of("w");
  part.set_shape(0, 1);
  part.set_size_bytes(6);
  part.set_offset_bytes(18);
  EXPECT_THAT(CheckPublishedTensors({Row(), part}, kSlabs), IsOk());
  part.set_offset_bytes(20);
  EXPECT_THAT(CheckPublishedTensors({Row(), part}, kSlabs), StatusIs(Reason::kManifestInvalid, HasSubstr("inside")));
  part.set_offset_bytes(17);
  EXPECT_THAT(CheckPublishedTensors({Row(), part}, kSlabs),
              StatusIs(Reason::kManifestInvalid, HasSubstr("no multiple of 2")));
  part.set_offset_bytes(18);
  v1::Tensor of_part = part;
  of_part.set_name("of_part");
  of_part.set_alias_of("part");
  EXPECT_THAT(CheckPublishedTensors({Row(), part, of_part}, kSlabs),
              StatusIs(Reason::kManifestInvalid, HasSubstr("one itself")));
}

v1::PublishPromise PromiseOf(const std::vector<v1::Tensor>& rows) {
  v1::PublishPromise promise;
  promise.set_tensor_count(static_cast<int64_t>(rows.size()));
  promise.set_size_bytes(PublishedTotalBytes(rows));
  promise.set_layout_sha256(PublishedLayoutSha256(rows));
  return promise;
}

TEST(PublishedTensors, KeepAPromiseOfNamesTypesShapesStridesAndAliases) {
  v1::Tensor alias = Row("tied");
  alias.set_alias_of("w");
  const std::vector<v1::Tensor> rows = {alias, Row()};
  const v1::PublishPromise promise = PromiseOf(rows);
  EXPECT_EQ(promise.size_bytes(), 24);
  EXPECT_THAT(CheckPromise(promise, rows), IsOk());
  const std::function<void(std::vector<v1::Tensor>&)> changes[] = {
      [](auto& other) { other.pop_back(); },
      [](auto& other) { other[1].set_name("x"); },
      [](auto& other) { other[1].set_dtype(v1::DATA_TYPE_F16); },
      [](auto& other) { std::swap((*other[1].mutable_shape())[0], (*other[1].mutable_shape())[1]); },
      [](auto& other) {
        SetStrides(other[1], {1, 4});
      },
      [](auto& other) { other[0].set_alias_of("x"); },
      [](auto& other) { other[0].clear_alias_of(); },
  };
  for (const auto& change : changes) {
    std::vector<v1::Tensor> other = rows;
    change(other);
    EXPECT_THAT(CheckPromise(promise, other), StatusIs(Reason::kPromiseBroken));
  }
}

TEST(PublishedTensors, KeepAPromiseThatLeavesTheLayoutOpen) {
  v1::PublishPromise promise = PromiseOf({Row()});
  promise.clear_layout_sha256();
  v1::Tensor other = Row("another name");
  EXPECT_THAT(CheckPromise(promise, std::vector<v1::Tensor>{other}), IsOk());
}

// As docs/publish.md gives it.
TEST(PublishedTensors, HashTheTextThatTheDocumentShows) {
  v1::Tensor strided = Row("w.t");
  SetStrides(strided, {1, 4});
  strided.set_alias_of("w");
  EXPECT_EQ(PublishedLayoutText(std::vector<v1::Tensor>{Row(), strided}),
            "1:w\tBF16\t4,3\t\t\n"
            "3:w.t\tBF16\t4,3\t1,4\t1:w\n");
}

}  // namespace
}  // namespace weightbroker
