#include "common/plan/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/status_matchers.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;

ShardPlan PlanOf(const std::vector<std::string>& names) {
  ShardPlan plan;
  for (size_t i = 0; i < names.size(); ++i) {
    TensorPlacement& tensor = plan.tensors.emplace_back();
    tensor.name = names[i];
    tensor.dtype = FindDtype("BF16");
    tensor.shape = {3, static_cast<int64_t>(i)};
    tensor.slab_offset_bytes = static_cast<int64_t>(i) * 256;
    tensor.size_bytes = 6 * static_cast<int64_t>(i);
  }
  return plan;
}

std::vector<Digest> DigestsFor(const ShardPlan& plan) {
  std::vector<Digest> digests(plan.tensors.size());
  for (size_t i = 0; i < digests.size(); ++i) digests[i].fill(static_cast<std::byte>(i));
  return digests;
}

std::vector<v1::ExportResponse> Parse(const std::string& bytes) {
  const auto frames = SplitManifest(bytes);
  EXPECT_THAT(frames, IsOk());
  std::vector<v1::ExportResponse> messages;
  for (const std::string_view frame : *frames) {
    EXPECT_TRUE(messages.emplace_back().ParseFromArray(frame.data(), static_cast<int>(frame.size())));
  }
  return messages;
}

TEST(Manifest, CarriesEveryFieldOfATensor) {
  ShardPlan plan = PlanOf({"a", "b"});
  plan.tensors[1].alias_of = "a";

  const auto bytes = SerializeManifest(plan, DigestsFor(plan));

  ASSERT_THAT(bytes, IsOk());
  const auto messages = Parse(*bytes);
  ASSERT_THAT(messages, SizeIs(1));
  ASSERT_EQ(messages[0].manifest().tensors_size(), 2);
  const v1::Tensor& tensor = messages[0].manifest().tensors(1);
  EXPECT_EQ(tensor.name(), "b");
  EXPECT_EQ(tensor.dtype(), v1::DATA_TYPE_BF16);
  EXPECT_THAT(tensor.shape(), ::testing::ElementsAre(3, 1));
  EXPECT_EQ(tensor.slab(), 0);
  EXPECT_EQ(tensor.offset_bytes(), 256);
  EXPECT_EQ(tensor.size_bytes(), 6);
  EXPECT_EQ(tensor.alias_of(), "a");
  EXPECT_EQ(tensor.digest(), std::string(16, '\1'));
}

TEST(Manifest, SplitsIntoFramesOfAtMostOneMebibyteInOrder) {
  std::vector<std::string> names;
  for (int i = 0; i < 30'000; ++i)
    names.push_back("model.layers.self_attention.projection.weight." + std::to_string(100'000 + i));
  const ShardPlan plan = PlanOf(names);

  const auto bytes = SerializeManifest(plan, DigestsFor(plan));

  ASSERT_THAT(bytes, IsOk());
  const auto frames = SplitManifest(*bytes);
  ASSERT_THAT(frames, IsOk());
  EXPECT_GT(frames->size(), 2u);
  for (const std::string_view frame : *frames) EXPECT_LE(static_cast<int64_t>(frame.size()), kMaxManifestFrameBytes);
  EXPECT_GT(static_cast<int64_t>(frames->front().size()), kMaxManifestFrameBytes * 8 / 10) << "frames are filled up";
  size_t next = 0;
  for (const v1::ExportResponse& message : Parse(*bytes)) {
    for (const v1::Tensor& tensor : message.manifest().tensors()) ASSERT_EQ(tensor.name(), names[next++]);
  }
  EXPECT_EQ(next, names.size());
}

TEST(Manifest, KeepsFramesUnderTheLimitWhateverTheSizesOfNames) {
  for (const size_t length : {size_t{100'000}, size_t{349'400}, size_t{524'200}, size_t{1'040'000}}) {
    const ShardPlan plan = PlanOf({std::string(length, 'a'), std::string(length, 'b'), std::string(length, 'c')});
    const auto bytes = SerializeManifest(plan, DigestsFor(plan));
    ASSERT_THAT(bytes, IsOk());
    const auto frames = SplitManifest(*bytes);
    ASSERT_THAT(frames, IsOk());
    for (const std::string_view frame : *frames) EXPECT_LE(static_cast<int64_t>(frame.size()), kMaxManifestFrameBytes);
  }
}

TEST(Manifest, RefusesATensorWhoseRowFitsNoFrame) {
  const ShardPlan plan = PlanOf({std::string(1 << 20, 'n')});
  EXPECT_THAT(SerializeManifest(plan, DigestsFor(plan)), StatusIs(Reason::kCheckpointTooLarge, HasSubstr("1048576")));
}

TEST(Manifest, RefusesAnotherNumberOfDigests) {
  EXPECT_THAT(SerializeManifest(PlanOf({"a"}), {}), StatusIs(Reason::kProtocolError));
}

TEST(Manifest, OfNoTensorsHasNoFrames) {
  const auto bytes = SerializeManifest({}, {});
  ASSERT_THAT(bytes, IsOk());
  EXPECT_THAT(*bytes, IsEmpty());
  EXPECT_THAT(*SplitManifest(*bytes), IsEmpty());
}

TEST(Manifest, IsRefusedWhereverItIsTorn) {
  const ShardPlan plan = PlanOf({"a", "b"});
  const std::string bytes = *SerializeManifest(plan, DigestsFor(plan));
  for (size_t size = 1; size < bytes.size(); ++size) {
    ASSERT_THAT(SplitManifest(std::string_view(bytes).substr(0, size)), StatusIs(Reason::kProtocolError)) << size;
  }
  EXPECT_THAT(SplitManifest(std::string("\0\0\0\0", 4)), StatusIs(Reason::kProtocolError)) << "an empty frame";
  EXPECT_THAT(SplitManifest(std::string("\1\0\x10\0", 4) + std::string((1 << 20) + 1, 'x')),
              StatusIs(Reason::kProtocolError))
      << "over the limit";
}

}  // namespace
}  // namespace weightbroker
