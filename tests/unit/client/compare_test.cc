#include "client/tool/compare.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace weightbroker::tool {
namespace {

// Tensors of bytes whose memory they point to.
class Copy {
 public:
  Copy& Add(std::string_view name, const std::vector<unsigned char>& bytes, std::string_view alias_of = "") {
    memory_.push_back(bytes);
    shapes_.push_back({static_cast<int64_t>(bytes.size())});
    Tensor& tensor = tensors_.emplace_back();
    tensor.name = name;
    tensor.dtype = DataType::kU8;
    tensor.shape = Dimensions(shapes_.back().data(), 1);
    tensor.data = reinterpret_cast<const std::byte*>(memory_.back().data());
    tensor.size_bytes = static_cast<int64_t>(bytes.size());
    tensor.alias_of = alias_of;
    return *this;
  }
  Tensor& last() { return tensors_.back(); }
  const std::vector<Tensor>& tensors() const { return tensors_; }

 private:
  std::vector<Tensor> tensors_;
  std::vector<std::vector<unsigned char>> memory_;
  std::vector<std::vector<int64_t>> shapes_;
};

TEST(CompareTensors, CountsWhatIsEqual) {
  Copy a;
  Copy b;
  for (Copy* copy : {&a, &b}) copy->Add("v", {1, 2}, "w").Add("w", {1, 2}).Add("x", {3});

  const Comparison comparison = CompareTensors(a.tensors(), b.tensors());

  EXPECT_TRUE(comparison.equal());
  EXPECT_EQ(comparison.tensors, 3);
  EXPECT_EQ(comparison.bytes, 3) << "an alias's bytes are its tensor's";
  EXPECT_FALSE(comparison.first.has_value());
}

TEST(CompareTensors, NamesTheFirstByteThatDiffersAndCountsThemAll) {
  Copy a;
  Copy b;
  a.Add("v", {1, 2}).Add("w", {1, 2, 3, 4}).Add("x", {7});
  b.Add("v", {1, 2}).Add("w", {1, 9, 3, 9}).Add("x", {8});

  const Comparison comparison = CompareTensors(a.tensors(), b.tensors());

  EXPECT_EQ(comparison.differing_tensors, 2);
  EXPECT_EQ(comparison.differing_bytes, 3);
  EXPECT_EQ(comparison.first->tensor, "w");
  EXPECT_EQ(comparison.first->what, "bytes");
  EXPECT_EQ(comparison.first->offset_bytes, 1);
  EXPECT_EQ(comparison.first->resident_byte, 2);
  EXPECT_EQ(comparison.first->disk_byte, 9);
}

TEST(CompareTensors, FindsAByteBeyondTheFirstMebibyte) {
  std::vector<unsigned char> bytes(3 << 20, 5);
  Copy a;
  Copy b;
  a.Add("w", bytes);
  bytes[(2 << 20) + 17] = 6;
  b.Add("w", bytes);

  const Comparison comparison = CompareTensors(a.tensors(), b.tensors());

  EXPECT_EQ(comparison.differing_bytes, 1);
  EXPECT_EQ(comparison.first->offset_bytes, (2 << 20) + 17);
}

TEST(CompareTensors, NamesTensorsThatOneCopyLacks) {
  Copy a;
  Copy b;
  a.Add("a", {1}).Add("c", {1});
  b.Add("b", {1}).Add("c", {1}).Add("d", {1});

  const Comparison comparison = CompareTensors(a.tensors(), b.tensors());

  EXPECT_EQ(comparison.tensors, 4);
  EXPECT_EQ(comparison.differing_tensors, 3);
  EXPECT_EQ(comparison.first->tensor, "a");
  EXPECT_EQ(comparison.first->what, "missing on disk");
  EXPECT_EQ(CompareTensors(b.tensors(), a.tensors()).first->what, "missing in memory");
}

TEST(CompareTensors, TakesAnotherTypeShapeOrAliasForADifference) {
  for (const char* const what : {"dtype", "shape", "alias"}) {
    Copy a;
    Copy b;
    a.Add("w", {1, 2});
    b.Add("w", {1, 2});
    if (what == std::string("dtype")) b.last().dtype = DataType::kI8;
    if (what == std::string("shape")) b.last().shape = Dimensions();
    if (what == std::string("alias")) b.last().alias_of = "v";
    EXPECT_EQ(CompareTensors(a.tensors(), b.tensors()).first->what, what);
  }
}

}  // namespace
}  // namespace weightbroker::tool
