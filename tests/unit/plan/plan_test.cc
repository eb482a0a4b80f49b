#include "common/plan/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>

#include "common/plan/architecture.h"
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

// One rank of a checkpoint as it is.
absl::StatusOr<ShardPlan> PlanShard(const Checkpoint& checkpoint, int32_t rank, const v1::WeightSpec& spec = {}) {
  auto plan = PlanNode({.checkpoint = checkpoint,
                        .spec = *CompleteSpec(spec),
                        .quantization = {},
                        .architectures = ArchitectureSet::Embedded(),
                        .ranks = {rank}});
  if (!plan.ok()) return plan.status();
  EXPECT_EQ(plan->read_bytes, plan->shards[0].read_bytes);
  return std::move(plan->shards[0]);
}

std::vector<std::string> NamesOf(const ShardPlan& plan) {
  std::vector<std::string> names;
  for (const TensorPlacement& tensor : plan.tensors) names.push_back(tensor.name);
  return names;
}

absl::StatusOr<ShardPlan> PlanSlabs(const Checkpoint& checkpoint, int max_slabs) {
  auto plan = PlanNode({.checkpoint = checkpoint,
                        .spec = *CompleteSpec({}),
                        .quantization = {},
                        .architectures = ArchitectureSet::Embedded(),
                        .ranks = {0},
                        .max_slabs = max_slabs});
  if (!plan.ok()) return plan.status();
  return std::move(plan->shards[0]);
}

TEST(PlanNode, DividesAShardIntoSlabsInFileOrder) {
  constexpr int64_t kTensorBytes = 60 << 20;
  std::vector<CheckpointTensor> tensors;
  for (int i = 0; i < 10; ++i) {
    tensors.push_back(MakeTensor("t" + std::to_string(9 - i), "U8", kTensorBytes, 0, i * kTensorBytes));
  }
  const Checkpoint checkpoint = MakeCheckpoint(std::move(tensors));

  const auto plan = PlanSlabs(checkpoint, 4);

  ASSERT_THAT(plan, IsOk());
  EXPECT_THAT(plan->slab_bytes, ElementsAre(3 * kTensorBytes, 3 * kTensorBytes, 3 * kTensorBytes, kTensorBytes));
  for (const TensorPlacement& tensor : plan->tensors) {
    const int64_t place = 9 - (tensor.name[1] - '0');
    EXPECT_EQ(tensor.slab, place / 3) << tensor.name;
    EXPECT_EQ(tensor.slab_offset_bytes, place % 3 * kTensorBytes) << tensor.name;
  }
  EXPECT_EQ(PlanSlabs(checkpoint, 1)->slab_bytes.size(), 1U);
}

TEST(PlanNode, MakesNoSlabOfLessThanItMay) {
  const Checkpoint checkpoint =
      MakeCheckpoint({MakeTensor("a", "U8", kLeastSlabBytes, 0, 0), MakeTensor("b", "U8", 1 << 20, 0, kLeastSlabBytes),
                      MakeTensor("c", "U8", 0, 0, kLeastSlabBytes + (1 << 20))});
  EXPECT_THAT(PlanSlabs(checkpoint, 8)->slab_bytes, ElementsAre(kLeastSlabBytes, 1 << 20));
}

TEST(PlanNode, AShardOfEmptyTensorsHasOneSlab) {
  const Checkpoint checkpoint = MakeCheckpoint({MakeTensor("a", "U8", 0, 0, 0), MakeTensor("b", "U8", 0, 0, 0)});
  EXPECT_THAT(PlanSlabs(checkpoint, 8)->slab_bytes, ElementsAre(kTensorAlignmentBytes));
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
  EXPECT_EQ(complete->pipeline_parallel_size(), 1);
  EXPECT_EQ(complete->expert_parallel_size(), 1);
  EXPECT_EQ(complete->data_parallel_size(), 1);
  EXPECT_EQ(complete->mtp_layers(), "keep");
}

TEST(CompleteSpec, LeavesACompleteSpecAsItIs) {
  v1::WeightSpec spec;
  spec.set_tensor_parallel_size(1);
  spec.set_quantization("fp8");
  spec.set_dtype("BF16");
  spec.set_layout("hf");
  spec.set_pipeline_parallel_size(1);
  spec.set_expert_parallel_size(1);
  spec.set_data_parallel_size(1);
  spec.set_mtp_layers("keep");
  const auto complete = CompleteSpec(spec);
  ASSERT_THAT(complete, IsOk());
  EXPECT_EQ(complete->SerializeAsString(), spec.SerializeAsString());
  EXPECT_EQ(CompleteSpec(*complete)->SerializeAsString(), spec.SerializeAsString());
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

TEST(CompleteSpec, RefusesGroupsOfExpertsThatDoNotDivideTheRanksOfAStage) {
  v1::WeightSpec spec;
  spec.set_tensor_parallel_size(4);
  spec.set_data_parallel_size(2);
  spec.set_expert_parallel_size(3);
  EXPECT_THAT(CompleteSpec(spec), AllOf(StatusIs(Reason::kInvalidArgument, HasSubstr("divide tensor_parallel_size")),
                                        HasMetadata("found", "3"), HasMetadata("field", "spec.expert_parallel_size")));
  spec.set_expert_parallel_size(8);
  EXPECT_THAT(CompleteSpec(spec), IsOk());
}

TEST(CompleteSpec, RefusesMoreRanksThanAnyMachineHas) {
  v1::WeightSpec spec;
  spec.set_tensor_parallel_size(1 << 12);
  spec.set_pipeline_parallel_size(1 << 12);
  EXPECT_THAT(CompleteSpec(spec), StatusIs(Reason::kInvalidArgument, HasSubstr("65536")));
}

TEST(CompleteSpec, TakesModulesToLeaveUnquantizedOnlyWhereItQuantizes) {
  v1::WeightSpec spec;
  spec.add_unquantized_modules("lm_head");
  spec.add_unquantized_modules("gate");
  spec.add_unquantized_modules("lm_head");
  EXPECT_THAT(CompleteSpec(spec), StatusIs(Reason::kInvalidArgument, HasSubstr("unquantized_modules")));
  spec.set_quantization("fp8_block");
  ASSERT_THAT(CompleteSpec(spec), IsOk());
  EXPECT_THAT(CompleteSpec(spec)->unquantized_modules(), ElementsAre("gate", "lm_head"));
  spec.add_unquantized_modules("layers.*.mlp");
  EXPECT_THAT(CompleteSpec(spec), StatusIs(Reason::kInvalidArgument, HasSubstr("layers.*.mlp")));
}

TEST(CompleteSpec, CountsItsRanks) {
  v1::WeightSpec spec;
  spec.set_tensor_parallel_size(2);
  spec.set_pipeline_parallel_size(3);
  EXPECT_EQ(WorldSize(*CompleteSpec(spec)), 6);
  EXPECT_THAT(AllRanks(*CompleteSpec(spec)), ElementsAre(0, 1, 2, 3, 4, 5));
}

TEST(CompleteSpec, RefusesWordsThatItDoesNotKnowListingThoseItDoes) {
  v1::WeightSpec spec;
  spec.set_quantization("awq");
  EXPECT_THAT(CompleteSpec(spec), AllOf(StatusIs(Reason::kInvalidArgument, HasSubstr("\"awq\"")),
                                        HasMetadata("allowed", "auto, none, fp8, fp8_block")));
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

TEST(SpecAgainstCheckpoint, TakesAnUnquantizedCheckpointToQuantizeAndNoOther) {
  const Checkpoint checkpoint = MakeCheckpoint({MakeTensor("a", "BF16", 100, 0, 0)});
  EXPECT_THAT(CheckSpecAgainstCheckpoint(SpecWith("fp8_block", ""), checkpoint, "none"), IsOk());
  EXPECT_THAT(CheckSpecAgainstCheckpoint(SpecWith("fp8_block", ""), checkpoint, "fp8"),
              AllOf(StatusIs(Reason::kQuantizationContradicted), HasMetadata("found", "fp8")));
}

TEST(SpecAgainstCheckpoint, RefusesAModuleThatTheCheckpointHasNoTensorOf) {
  Checkpoint checkpoint = MakeCheckpoint({MakeTensor("model.layers.0.mlp.gate_proj.weight", "BF16", 100, 0, 0),
                                          MakeTensor("model.layers.0.self_attn.qkv_proj.weight", "BF16", 100, 0, 200)});
  checkpoint.aliases["lm_head.weight"] = "model.embed_tokens.weight";
  const auto check = [&](const std::vector<std::string>& modules) {
    v1::WeightSpec spec = SpecWith("fp8_block", "");
    spec.mutable_unquantized_modules()->Assign(modules.begin(), modules.end());
    return CheckSpecAgainstCheckpoint(spec, checkpoint, "none");
  };
  EXPECT_THAT(check({"gate_proj", "layers.0", "lm_head", "qkv_proj"}), IsOk());
  EXPECT_THAT(check({"k_proj", "q_proj", "v_proj"}), IsOk()) << "together they are the fused one";
  EXPECT_THAT(check({"gate_proj", "gate_prog"}),
              AllOf(StatusIs(Reason::kInvalidArgument, HasSubstr("misspelt")), HasMetadata("found", "gate_prog")));
  EXPECT_THAT(check({"layers.1"}), AllOf(StatusIs(Reason::kInvalidArgument), HasMetadata("found", "layers.1")));
}

TEST(SpecAgainstCheckpoint, RefusesToConvertWhatIsNoneOfTheThreeTypesNamingBoth) {
  const Checkpoint checkpoint = MakeCheckpoint({MakeTensor("a", "F64", 100, 0, 0), MakeTensor("b", "F32", 10, 0, 800)});
  EXPECT_THAT(CheckSpecAgainstCheckpoint(SpecWith("", "F32"), checkpoint, "none"),
              AllOf(StatusIs(Reason::kDtypeMismatch), HasMetadata("requested", "F32"), HasMetadata("found", "F64")));
}

TEST(SpecAgainstCheckpoint, DoesNotTakeFp8WeightsAndTheirScalesForTheModelsDtype) {
  const Checkpoint checkpoint = MakeCheckpoint({MakeTensor("l.weight", "F8_E4M3", 10'000, 0, 0),
                                                MakeTensor("l.weight_scale_inv", "F32", 1000, 0, 10'000),
                                                MakeTensor("norm", "F64", 10, 0, 14'000)});
  EXPECT_THAT(CheckSpecAgainstCheckpoint(SpecWith("fp8", "BF16"), checkpoint, "fp8"),
              AllOf(StatusIs(Reason::kDtypeMismatch), HasMetadata("found", "F64")));
}

TEST(SpecAgainstCheckpoint, AcceptsAnyDtypeWhereNothingContradictsIt) {
  const Checkpoint checkpoint = MakeCheckpoint({MakeTensor("ids", "I64", 100, 0, 0)});
  EXPECT_THAT(CheckSpecAgainstCheckpoint(SpecWith("", "F16"), checkpoint, "none"), IsOk());
}

TEST(PlanNode, PacksTensorsAlignedInTheOrderOfTheFilesAndListsThemByName) {
  const Checkpoint checkpoint = MakeCheckpoint({MakeTensor("a", "U8", 300, 1, 50), MakeTensor("b", "U8", 10, 0, 101),
                                                MakeTensor("c", "U8", 1, 0, 100), MakeTensor("d", "BF16", 0, 0, 111)});

  const auto plan = PlanShard(checkpoint, 0);

  ASSERT_THAT(plan, IsOk());
  EXPECT_THAT(NamesOf(*plan), ElementsAre("a", "b", "c", "d"));
  EXPECT_EQ(plan->tensors[2].slab_offset_bytes, 0) << "c lies first";
  EXPECT_EQ(plan->tensors[1].slab_offset_bytes, 256);
  EXPECT_EQ(plan->tensors[3].slab_offset_bytes, 512) << "d is empty";
  EXPECT_EQ(plan->tensors[0].slab_offset_bytes, 512);
  ASSERT_EQ(plan->tensors[0].pieces.size(), 1u);
  EXPECT_EQ(plan->tensors[0].pieces[0].source, 0);
  EXPECT_EQ(plan->tensors[0].pieces[0].run_elements, 300);
  EXPECT_THAT(plan->slab_bytes, ElementsAre(1024));
  EXPECT_EQ(plan->read_bytes, 311);
}

TEST(PlanNode, GivesATiedWeightItsTargetsPlaceAndReadsItOnce) {
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

TEST(PlanNode, GivesACheckpointOfEmptyTensorsASlabAllTheSame) {
  const auto plan = PlanShard(MakeCheckpoint({MakeTensor("a", "F32", 0, 0, 8)}), 0);
  ASSERT_THAT(plan, IsOk());
  EXPECT_THAT(plan->slab_bytes, ElementsAre(kTensorAlignmentBytes));
  EXPECT_EQ(plan->read_bytes, 0);
}

TEST(PlanNode, RefusesARankThatIsNotThere) {
  const Checkpoint checkpoint = MakeCheckpoint({MakeTensor("a", "F32", 1, 0, 8)});
  EXPECT_THAT(PlanShard(checkpoint, 1), StatusIs(Reason::kRankOutOfRange, HasSubstr("rank 1")));
  EXPECT_THAT(PlanShard(checkpoint, -1), StatusIs(Reason::kRankOutOfRange));
}

TEST(PlanNode, ConvertsWeightsThatHaveAnotherTypeThanIsAskedFor) {
  v1::WeightSpec spec;
  spec.set_dtype("BF16");
  const auto plan = PlanShard(MakeCheckpoint({MakeTensor("a", "F32", 100, 0, 0), MakeTensor("b", "BF16", 10, 0, 400),
                                              MakeTensor("ids", "I64", 10, 0, 420)}),
                              0, spec);
  ASSERT_THAT(plan, IsOk());
  EXPECT_EQ(plan->tensors[0].transform, Transform::kConvert);
  EXPECT_EQ(plan->tensors[0].dtype->name, "BF16");
  EXPECT_EQ(plan->tensors[0].size_bytes, 200);
  EXPECT_EQ(plan->tensors[1].transform, Transform::kCopy);
  EXPECT_EQ(plan->tensors[2].dtype->name, "I64");
  EXPECT_EQ(plan->read_bytes, 500);
}

TEST(PlanNode, RefusesSizesThatAddUpPastSixtyThreeBits) {
  CheckpointTensor huge = MakeTensor("b", "U8", 1, 0, 100);
  huge.size_bytes = std::numeric_limits<int64_t>::max() - 300;
  huge.shape = {huge.size_bytes};
  EXPECT_THAT(PlanShard(MakeCheckpoint({MakeTensor("a", "U8", 1, 0, 0), huge}), 0),
              StatusIs(Reason::kCheckpointTooLarge, HasSubstr("\"b\"")));
}

}  // namespace
}  // namespace weightbroker
