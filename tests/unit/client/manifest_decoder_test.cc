#include "client/src/manifest_decoder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "common/base/wire.h"
#include "tests/support/status_matchers.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker::client {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;

constexpr int64_t kSlabBytes = 1024;
alignas(256) std::byte g_slab[kSlabBytes];
const SlabView kSlabs[] = {{g_slab, kSlabBytes}};

v1::Tensor Row(const std::string& name) {
  v1::Tensor row;
  row.set_name(name);
  row.set_dtype(v1::DATA_TYPE_BF16);
  row.add_shape(4);
  row.add_shape(3);
  row.set_offset_bytes(256);
  row.set_size_bytes(24);
  row.set_digest("0123456789abcdef");
  return row;
}

RawMessage Message(const std::vector<v1::Tensor>& rows) {
  v1::ExportResponse response;
  for (const v1::Tensor& row : rows) *response.mutable_manifest()->add_tensors() = row;
  return RawMessage(response.SerializeAsString());
}

absl::StatusOr<Manifest> Decode(RawMessage message, int64_t tensor_count) {
  ManifestDecoder decoder({kSlabBytes}, tensor_count);
  if (absl::Status status = decoder.Add(std::move(message)); !status.ok()) return status;
  return std::move(decoder).Finish(kSlabs);
}

absl::Status DecodeOne(const std::function<void(v1::Tensor&)>& change) {
  v1::Tensor row = Row("w");
  change(row);
  return Decode(Message({row}), 1).status();
}

TEST(ManifestDecoder, GivesEveryTensorItsAddress) {
  v1::Tensor alias = Row("tied");
  alias.set_alias_of("a");
  v1::Tensor scalar = Row("scalar");
  scalar.clear_shape();
  scalar.set_size_bytes(2);
  scalar.set_offset_bytes(512);

  const auto manifest = Decode(Message({Row("a"), scalar, alias}), 3);

  ASSERT_THAT(manifest, IsOk());
  ASSERT_EQ(manifest->tensors.size(), 3u);
  const Tensor& a = manifest->tensors[0];
  EXPECT_EQ(a.name, "a");
  EXPECT_EQ(a.dtype, DataType::kBF16);
  EXPECT_THAT(a.shape, ElementsAre(4, 3));
  EXPECT_EQ(a.data, g_slab + 256);
  EXPECT_EQ(a.size_bytes, 24);
  EXPECT_EQ(std::string(a.digest.begin(), a.digest.end()), "0123456789abcdef");
  EXPECT_TRUE(manifest->tensors[1].shape.empty());
  EXPECT_EQ(FindTensor(manifest->tensors, "tied")->alias_of, "a");
  EXPECT_EQ(FindTensor(manifest->tensors, "tied")->data, a.data);
  EXPECT_EQ(FindTensor(manifest->tensors, "b"), nullptr);
  EXPECT_EQ(manifest->total_bytes, 26) << "an alias's bytes are counted once";
}

TEST(ManifestDecoder, TakesSeveralMessages) {
  ManifestDecoder decoder({kSlabBytes}, 2);

  ASSERT_THAT(decoder.Add(Message({Row("a")})), IsOk());
  EXPECT_FALSE(decoder.complete());
  ASSERT_THAT(decoder.Add(Message({Row("b")})), IsOk());
  EXPECT_TRUE(decoder.complete());
  EXPECT_THAT(std::move(decoder).Finish(kSlabs), IsOk());
}

TEST(ManifestDecoder, GivesWhatAnEngineHasPublishedOfATensor) {
  v1::Tensor whole = Row("a");
  whole.set_kind(v1::TENSOR_KIND_NON_PERSISTENT_BUFFER);
  (*whole.mutable_metadata())["format"] = "ue8m0";
  (*whole.mutable_metadata())["by"] = "";
  v1::Tensor sideways = Row("b");  // the same memory
  sideways.set_alias_of("a");
  sideways.mutable_shape()->SwapElements(0, 1);
  sideways.add_strides(1);
  sideways.add_strides(3);
  v1::Tensor last_row = Row("c");
  last_row.set_alias_of("a");
  last_row.set_shape(0, 1);
  last_row.set_size_bytes(6);
  last_row.set_offset_bytes(256 + 18);
  v1::Tensor gaps = Row("d");
  gaps.add_strides(10);
  gaps.add_strides(2);
  gaps.set_size_bytes((3 * 10 + 2 * 2 + 1) * 2);
  gaps.set_offset_bytes(512);

  const auto manifest = Decode(Message({whole, sideways, last_row, gaps}), 4);

  ASSERT_THAT(manifest, IsOk());
  EXPECT_EQ(manifest->tensors[0].kind, TensorKind::kNonPersistentBuffer);
  EXPECT_THAT(manifest->tensors[0].metadata, ElementsAre(TensorNote("by", ""), TensorNote("format", "ue8m0")));
  EXPECT_TRUE(manifest->tensors[0].stated_strides.empty());
  EXPECT_THAT(manifest->tensors[1].Strides(), ElementsAre(1, 3));
  EXPECT_EQ(manifest->tensors[2].data, g_slab + 256 + 18);
  EXPECT_THAT(manifest->tensors[3].stated_strides, ElementsAre(10, 2));
  EXPECT_EQ(manifest->total_bytes, 24 + 70);
}

TEST(ManifestDecoder, RefusesStridesThatDoNotGiveTheSize) {
  const auto with_strides = [](const std::vector<int64_t>& strides) {
    return DecodeOne([&](v1::Tensor& row) { row.mutable_strides()->Assign(strides.begin(), strides.end()); });
  };
  EXPECT_THAT(with_strides({3, 1}), IsOk());
  for (const std::vector<int64_t>& wrong :
       {std::vector<int64_t>{3}, {3, 1, 1}, {4, 1}, {-3, 1}, {int64_t{1} << 62, 1}, {int64_t{1} << 61, 1}}) {
    EXPECT_THAT(with_strides(wrong), StatusIs(Reason::kProtocolError, HasSubstr("type and shape give")));
  }
}

TEST(ManifestDecoder, GivesATensorWithoutElementsNoAddress) {
  v1::Tensor row = Row("empty");
  row.set_shape(0, 0);
  row.set_size_bytes(0);
  row.set_offset_bytes(1 << 30);

  const auto manifest = Decode(Message({row}), 1);

  ASSERT_THAT(manifest, IsOk());
  EXPECT_EQ(manifest->tensors[0].data, nullptr);
}

TEST(ManifestDecoder, PassesOverFieldsOfALaterVersion) {
  v1::Tensor row = Row("w");
  row.GetReflection()->MutableUnknownFields(&row)->AddVarint(99, 1);
  row.GetReflection()->MutableUnknownFields(&row)->AddLengthDelimited(100, "later");

  EXPECT_THAT(Decode(Message({row}), 1), IsOk());
}

// As a message whose only tensor has these bytes.
absl::StatusOr<Manifest> DecodeRow(const std::string& row) {
  WireWriter chunk;
  chunk.AddBytes(1, row);
  WireWriter response;
  response.AddBytes(2, chunk.bytes());
  return Decode(RawMessage(response.bytes()), 1);
}

TEST(ManifestDecoder, ReadsDimensionsThatComeOneByOne) {
  v1::Tensor row = Row("w");
  row.clear_shape();
  WireWriter shape;
  shape.AddVarint(3, 4);
  shape.AddVarint(3, 3);

  const auto manifest = DecodeRow(row.SerializeAsString() + shape.bytes());

  ASSERT_THAT(manifest, IsOk());
  EXPECT_THAT(manifest->tensors[0].shape, ElementsAre(4, 3));
}

TEST(ManifestDecoder, RefusesAKnownFieldOfAnotherTypeOnTheWire) {
  for (const int number : {1, 7, 8, 11}) {
    WireWriter field;
    field.AddVarint(number, 1);
    EXPECT_THAT(DecodeRow(Row("w").SerializeAsString() + field.bytes()),
                StatusIs(Reason::kProtocolError, HasSubstr("not a serialized Tensor")))
        << number;
  }
  for (const int number : {2, 4, 5, 6, 10}) {
    WireWriter field;
    field.AddBytes(number, "");
    EXPECT_THAT(DecodeRow(Row("w").SerializeAsString() + field.bytes()),
                StatusIs(Reason::kProtocolError, HasSubstr("not a serialized Tensor")))
        << number;
  }
}

TEST(ManifestDecoder, RefusesTensorsThatDoNotLieInTheirSlab) {
  EXPECT_THAT(DecodeOne([](v1::Tensor& row) { row.set_offset_bytes(1024); }),
              AllOf(StatusIs(Reason::kProtocolError, HasSubstr("takes 24 bytes from offset 1024 of a slab of 1024")),
                    HasMetadata("tensor", "w")));
  EXPECT_THAT(DecodeOne([](v1::Tensor& row) { row.set_offset_bytes(-256); }),
              StatusIs(Reason::kProtocolError, HasSubstr("at offset -256")));
  EXPECT_THAT(DecodeOne([](v1::Tensor& row) { row.set_offset_bytes(INT64_MAX & ~int64_t{255}); }),
              StatusIs(Reason::kProtocolError, HasSubstr("of a slab of 1024")));
  EXPECT_THAT(DecodeOne([](v1::Tensor& row) { row.set_offset_bytes(8); }),
              StatusIs(Reason::kProtocolError, HasSubstr("not a multiple of 256")));
  EXPECT_THAT(DecodeOne([](v1::Tensor& row) { row.set_slab(1); }),
              StatusIs(Reason::kProtocolError, HasSubstr("slab 1 of 1")));
  EXPECT_THAT(DecodeOne([](v1::Tensor& row) { row.set_slab(-1); }),
              StatusIs(Reason::kProtocolError, HasSubstr("slab -1 of 1")));
}

TEST(ManifestDecoder, RefusesSizesThatTypeAndShapeDoNotGive) {
  EXPECT_THAT(DecodeOne([](v1::Tensor& row) { row.set_size_bytes(25); }),
              StatusIs(Reason::kProtocolError, HasSubstr("has 25 bytes but type and shape give 24")));
  EXPECT_THAT(DecodeOne([](v1::Tensor& row) {
                row.set_shape(0, INT64_MAX);
                row.set_shape(1, INT64_MAX);
              }),
              StatusIs(Reason::kProtocolError, HasSubstr("type and shape give -1")));
  EXPECT_THAT(DecodeOne([](v1::Tensor& row) {
                row.set_shape(0, -4);
                row.set_shape(1, -3);
              }),
              StatusIs(Reason::kProtocolError, HasSubstr("type and shape give -1")));
  EXPECT_THAT(DecodeOne([](v1::Tensor& row) { row.set_dtype(static_cast<v1::DataType>(77)); }),
              StatusIs(Reason::kProtocolError, HasSubstr("unknown element type 77")));
}

TEST(ManifestDecoder, RefusesNamesThatAreNotSortedAndUnique) {
  EXPECT_THAT(Decode(Message({Row("b"), Row("a")}), 2),
              StatusIs(Reason::kProtocolError, HasSubstr("\"a\" comes after \"b\"")));
  EXPECT_THAT(Decode(Message({Row("a"), Row("a")}), 2), StatusIs(Reason::kProtocolError, HasSubstr("twice")));
  EXPECT_THAT(Decode(Message({Row("")}), 1), StatusIs(Reason::kProtocolError, HasSubstr("has no name")));
}

TEST(ManifestDecoder, RefusesAnotherCountThanAnnounced) {
  EXPECT_THAT(Decode(Message({Row("a")}), 2), StatusIs(Reason::kProtocolError, HasSubstr("1 tensors but 2")));
  EXPECT_THAT(Decode(Message({Row("a"), Row("b")}), 1),
              StatusIs(Reason::kProtocolError, HasSubstr("one more than the 1 announced")));
  EXPECT_THAT(Decode(Message({}), -1), StatusIs(Reason::kProtocolError));
}

TEST(ManifestDecoder, RefusesAliasesOfOtherMemory) {
  v1::Tensor dangling = Row("b");
  dangling.set_alias_of("nothing");
  v1::Tensor elsewhere = Row("b");
  elsewhere.set_alias_of("a");
  elsewhere.set_offset_bytes(512);
  v1::Tensor itself = Row("b");
  itself.set_alias_of("b");

  v1::Tensor beyond = Row("b");
  beyond.set_alias_of("a");
  beyond.set_offset_bytes(256 + 2);

  for (const v1::Tensor& alias : {dangling, elsewhere, itself, beyond}) {
    EXPECT_THAT(Decode(Message({Row("a"), alias}), 2), StatusIs(Reason::kProtocolError, HasSubstr("is an alias of")));
  }
}

TEST(ManifestDecoder, RefusesADigestOfAnotherLength) {
  EXPECT_THAT(DecodeOne([](v1::Tensor& row) { row.set_digest("short"); }),
              StatusIs(Reason::kProtocolError, HasSubstr("digest of 5 bytes")));
}

TEST(ManifestDecoder, RefusesAnotherMessageInTheMiddle) {
  v1::ExportResponse event;
  event.mutable_event()->set_kind(v1::ExportEvent::KIND_DRAINING);

  EXPECT_THAT(Decode(RawMessage(event.SerializeAsString()), 1),
              StatusIs(Reason::kProtocolError, HasSubstr("before the manifest was complete")));
}

// Whatever arrives, what passes lies in the slab. Run with AddressSanitizer it also finds reads outside the message.
TEST(ManifestDecoder, KeepsTensorsInTheSlabWhateverArrives) {
  const RawMessage valid = Message({Row("a"), Row("b"), Row("c")});
  std::mt19937 random(1);  // NOLINT(cert-msc51-cpp): the same on every run
  for (int i = 0; i < 20'000; ++i) {
    std::string bytes(valid.bytes());
    for (int flips = 0; flips < 3; ++flips) bytes[random() % bytes.size()] = static_cast<char>(random());
    if (random() % 4 == 0) bytes.resize(random() % bytes.size());
    const auto manifest = Decode(RawMessage(bytes), 3);
    if (!manifest.ok()) continue;
    for (const Tensor& tensor : manifest->tensors) {
      if (tensor.size_bytes == 0) continue;
      ASSERT_GE(tensor.data, g_slab);
      ASSERT_LE(tensor.data + tensor.size_bytes, g_slab + kSlabBytes);
    }
  }
}

TEST(DimensionPool, NeverMovesWhatItHandedOut) {
  DimensionPool pool;
  std::vector<Dimensions> handed_out;
  for (int64_t i = 0; i < 10'000; ++i) handed_out.push_back(pool.Copy({i, i + 1, i + 2}));

  const DimensionPool moved = std::move(pool);
  for (int64_t i = 0; i < 10'000; ++i) EXPECT_THAT(handed_out[static_cast<size_t>(i)], ElementsAre(i, i + 1, i + 2));
}

}  // namespace
}  // namespace weightbroker::client
