#include "common/plan/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>

#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;

CheckpointTensor MakeTensor(const std::string& name, const std::string& dtype, int64_t elements, int32_t file_index,
                            int64_t offset_bytes) {
  const DtypeInfo* const info = FindDtype(dtype);
  return {name, info, {elements}, file_index, offset_bytes, elements * info->bits / 8};
}

Checkpoint MakeCheckpoint(std::vector<CheckpointTensor> tensors) {
  Checkpoint checkpoint;
  std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  checkpoint.tensors = std::move(tensors);
  return checkpoint;
}

std::vector<std::string> NamesOf(const ShardPlan& plan) {
  std::vector<std::string> names;
  for (const TensorPlacement& tensor : plan.tensors) names.push_back(tensor.name);
  return names;
}

TEST(CompleteSpec, FillsInDefaults) {
  v1::WeightSpec spec;
  spec.set_model("name:folder");

  const auto complete = CompleteSpec(spec);

  ASSERT_THAT(complete, IsOk());
  EXPECT_EQ(complete->model(), "name:folder");
  EXPECT_EQ(complete->tensor_parallel_size(), 1);
  EXPECT_EQ(complete->quantization(), "auto");
  EXPECT_EQ(complete->dtype(), "auto");
  EXPECT_EQ(complete->layout(), "hf");
}

TEST(CompleteSpec, LeavesACompleteSpecAsItIs) {
  v1::WeightSpec spec;
  spec.set_tensor_parallel_size(1);
  spec.set_quantization("fp8");
  spec.set_dtype("BF16");
  spec.set_layout("hf");
  const auto complete = CompleteSpec(spec);
  ASSERT_THAT(complete, IsOk());
  EXPECT_EQ(complete->SerializeAsString(), spec.SerializeAsString());
  EXPECT_EQ(CompleteSpec(*complete)->SerializeAsString(), spec.SerializeAsString());
}

TEST(CompleteSpec, RefusesMoreThanOneRankNamingTheNumber) {
  v1::WeightSpec spec;
  spec.set_tensor_parallel_size(8);
  EXPECT_THAT(CompleteSpec(spec), AllOf(StatusIs(Reason::kParallelismUnsupported, HasSubstr("is 8")),
                                        HasMetadata("field", "spec.tensor_parallel_size")));
}

TEST(CompleteSpec, RefusesANegativeNumberOfRanks) {
  v1::WeightSpec spec;
  spec.set_tensor_parallel_size(-1);
  EXPECT_THAT(CompleteSpec(spec), StatusIs(Reason::kInvalidArgument, HasSubstr("-1")));
}

TEST(CompleteSpec, RefusesAnotherLayoutNamingTheOneItServes) {
  v1::WeightSpec spec;
  spec.set_layout("vllm");
  EXPECT_THAT(CompleteSpec(spec), StatusIs(Reason::kLayoutUnsupported, AllOf(HasSubstr("\"vllm\""), HasSubstr("hf"))));
}

TEST(CompleteSpec, RefusesWordsThatItDoesNotKnowListingThoseItDoes) {
  v1::WeightSpec spec;
  spec.set_quantization("awq");
  EXPECT_THAT(CompleteSpec(spec), AllOf(StatusIs(Reason::kInvalidArgument, HasSubstr("\"awq\"")),
                                        HasMetadata("allowed", "auto, none, fp8")));
  spec.set_quantization("");
  spec.set_dtype("bfloat16");
  EXPECT_THAT(CompleteSpec(spec), AllOf(StatusIs(Reason::kInvalidArgument, HasSubstr("spec.dtype")),
                                        HasMetadata("allowed", "auto, BF16, F16, F32")));
}

v1::WeightSpec SpecWith(const std::string& quantization, const std::string& dtype) {
  v1::WeightSpec spec;
  spec.set_quantization(quantization);
  spec.set_dtype(dtype);
  return *CompleteSpec(spec);
}

TEST(SpecAgainstCheckpoint, AcceptsWhatTheCheckpointHas) {
  const Checkpoint checkpoint =
      MakeCheckpoint({MakeTensor("a", "BF16", 100, 0, 0), MakeTensor("b", "F32", 10, 0, 200)});
  EXPECT_THAT(CheckSpecAgainstCheckpoint(SpecWith("", ""), checkpoint, "none"), IsOk());
  EXPECT_THAT(CheckSpecAgainstCheckpoint(SpecWith("none", "BF16"), checkpoint, "none"), IsOk());
  EXPECT_THAT(CheckSpecAgainstCheckpoint(SpecWith("fp8", ""), checkpoint, "fp8"), IsOk());
}

TEST(SpecAgainstCheckpoint, RefusesAnotherQuantizationNamingBoth) {
  const Checkpoint checkpoint = MakeCheckpoint({MakeTensor("a", "BF16", 100, 0, 0)});
  EXPECT_THAT(CheckSpecAgainstCheckpoint(SpecWith("fp8", ""), checkpoint, "none"),
              AllOf(StatusIs(Reason::kQuantizationContradicted), HasMetadata("requested", "fp8"),
                    HasMetadata("found", "none")));
}

TEST(SpecAgainstCheckpoint, RefusesAnotherDtypeThanMostOfTheWeightsHaveNamingBoth) {
  const Checkpoint checkpoint =
      MakeCheckpoint({MakeTensor("a", "BF16", 100, 0, 0), MakeTensor("b", "F32", 10, 0, 200)});
  EXPECT_THAT(CheckSpecAgainstCheckpoint(SpecWith("", "F32"), checkpoint, "none"),
              AllOf(StatusIs(Reason::kDtypeMismatch), HasMetadata("requested", "F32"), HasMetadata("found", "BF16")));
}

TEST(SpecAgainstCheckpoint, DoesNotTakeFp8WeightsAndTheirScalesForTheModelsDtype) {
  const Checkpoint checkpoint = MakeCheckpoint({MakeTensor("l.weight", "F8_E4M3", 10'000, 0, 0),
                                                MakeTensor("l.weight_scale_inv", "F32", 1000, 0, 10'000),
                                                MakeTensor("norm", "BF16", 10, 0, 14'000)});
  EXPECT_THAT(CheckSpecAgainstCheckpoint(SpecWith("fp8", "BF16"), checkpoint, "fp8"), IsOk());
  EXPECT_THAT(CheckSpecAgainstCheckpoint(SpecWith("fp8", "F32"), checkpoint, "fp8"), StatusIs(Reason::kDtypeMismatch));
}

TEST(SpecAgainstCheckpoint, AcceptsAnyDtypeWhereNothingContradictsIt) {
  const Checkpoint checkpoint = MakeCheckpoint({MakeTensor("ids", "I64", 100, 0, 0)});
  EXPECT_THAT(CheckSpecAgainstCheckpoint(SpecWith("", "F16"), checkpoint, "none"), IsOk());
}

TEST(PlanShard, PacksTensorsAlignedInTheOrderOfTheFilesAndListsThemByName) {
  const Checkpoint checkpoint = MakeCheckpoint({MakeTensor("a", "U8", 300, 1, 50), MakeTensor("b", "U8", 10, 0, 101),
                                                MakeTensor("c", "U8", 1, 0, 100), MakeTensor("d", "BF16", 0, 0, 111)});

  const auto plan = PlanShard(checkpoint, 0);

  ASSERT_THAT(plan, IsOk());
  EXPECT_THAT(NamesOf(*plan), ElementsAre("a", "b", "c", "d"));
  EXPECT_EQ(plan->tensors[2].slab_offset_bytes, 0) << "c lies first";
  EXPECT_EQ(plan->tensors[1].slab_offset_bytes, 256);
  EXPECT_EQ(plan->tensors[3].slab_offset_bytes, 512) << "d is empty";
  EXPECT_EQ(plan->tensors[0].slab_offset_bytes, 512);
  EXPECT_EQ(plan->tensors[0].file_index, 1);
  EXPECT_EQ(plan->tensors[0].file_offset_bytes, 50);
  EXPECT_THAT(plan->slab_bytes, ElementsAre(1024));
  EXPECT_EQ(plan->read_bytes, 311);
}

TEST(PlanShard, GivesATiedWeightItsTargetsPlaceAndReadsItOnce) {
  Checkpoint checkpoint = MakeCheckpoint({MakeTensor("embed.weight", "BF16", 64, 0, 8)});
  checkpoint.aliases["a_head.weight"] = "embed.weight";

  const auto plan = PlanShard(checkpoint, 0);

  ASSERT_THAT(plan, IsOk());
  ASSERT_THAT(NamesOf(*plan), ElementsAre("a_head.weight", "embed.weight"));
  EXPECT_EQ(plan->tensors[0].alias_of, "embed.weight");
  EXPECT_EQ(plan->tensors[0].slab_offset_bytes, plan->tensors[1].slab_offset_bytes);
  EXPECT_THAT(plan->tensors[0].shape, ElementsAre(64));
  EXPECT_EQ(plan->read_bytes, 128);
  EXPECT_THAT(plan->slab_bytes, ElementsAre(256));
}

TEST(PlanShard, GivesACheckpointOfEmptyTensorsASlabAllTheSame) {
  const auto plan = PlanShard(MakeCheckpoint({MakeTensor("a", "F32", 0, 0, 8)}), 0);
  ASSERT_THAT(plan, IsOk());
  EXPECT_THAT(plan->slab_bytes, ElementsAre(kTensorAlignmentBytes));
  EXPECT_EQ(plan->read_bytes, 0);
}

TEST(PlanShard, RefusesARankThatIsNotThere) {
  const Checkpoint checkpoint = MakeCheckpoint({MakeTensor("a", "F32", 1, 0, 8)});
  EXPECT_THAT(PlanShard(checkpoint, 1), StatusIs(Reason::kRankOutOfRange, HasSubstr("rank 1")));
  EXPECT_THAT(PlanShard(checkpoint, -1), StatusIs(Reason::kRankOutOfRange));
}

TEST(PlanShard, RefusesSizesThatAddUpPastSixtyThreeBits) {
  CheckpointTensor huge = MakeTensor("b", "U8", 1, 0, 100);
  huge.size_bytes = std::numeric_limits<int64_t>::max() - 300;
  EXPECT_THAT(PlanShard(MakeCheckpoint({MakeTensor("a", "U8", 1, 0, 0), huge}), 0),
              StatusIs(Reason::kCheckpointTooLarge, HasSubstr("\"b\"")));
}

}  // namespace
}  // namespace weightbroker
