// Tensors against a config that the gate accepts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/quant/gate.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::weightbroker::testing::CheckpointBuilder;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::kBlockFp8Config;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::TemporaryFolder;

absl::StatusOr<Quantization> Check(const CheckpointBuilder& builder) {
  const TemporaryFolder dir;
  builder.Write(dir.path());
  const auto checkpoint = OpenCheckpoint(RealFileSystem(), dir.path());
  return checkpoint.ok() ? CheckQuantization(*checkpoint) : checkpoint.status();
}

CheckpointBuilder Fp8() { return CheckpointBuilder().Config(kBlockFp8Config); }

CheckpointBuilder Fp8Ignoring(const std::string& module) {
  return CheckpointBuilder().Config(
      R"({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [")" +
      module + "\"]}}");
}

TEST(GateTensors, AcceptsUnquantizedWeights) {
  EXPECT_EQ(
      Check(
          CheckpointBuilder().Tensor("a.weight", "BF16", {2, 3}).Tensor("ids", "I64", {1, 8}).Tensor("m", "BOOL", {4}))
          ->method,
      "none");
}

TEST(GateTensors, AcceptsBlockFp8WithWhatIsNeverQuantized) {
  EXPECT_EQ(Check(Fp8()
                      .BlockFp8("model.layers.0.q.weight", {256, 130})
                      .BlockFp8("model.layers.0.experts.up", {2, 128, 129})
                      .Tensor("model.embed_tokens.weight", "BF16", {10, 8})
                      .Tensor("model.norm.weight", "F32", {8}))
                ->method,
            "fp8");
}

TEST(GateTensors, AcceptsScalesInEachFloatTypeThatEnginesRead) {
  for (const char* type : {"F32", "BF16", "F16"}) {
    EXPECT_THAT(Check(Fp8().BlockFp8("w", {1, 1}, CheckpointBuilder::kSingle, type)), IsOk()) << type;
  }
}

TEST(GateTensors, FindsAScaleInAnotherShard) {
  EXPECT_THAT(Check(Fp8()
                        .Tensor("w", "F8_E4M3", {200, 300}, "1.safetensors")
                        .Tensor("w_scale_inv", "F32", {2, 3}, "2.safetensors")
                        .WithIndex()),
              IsOk());
}

TEST(GateTensors, RefusesFp8WithoutAConfig) {
  const auto quantization = Check(CheckpointBuilder().BlockFp8("a.weight", {4, 4}));
  EXPECT_THAT(quantization,
              StatusIs(Reason::kQuantizationContradicted, AllOf(HasSubstr("\"a.weight\""), HasSubstr("is FP8"))));
  EXPECT_THAT(quantization, HasMetadata("tensor", "a.weight"));
}

TEST(GateTensors, RefusesAConfigOfFp8WithoutFp8Tensors) {
  EXPECT_THAT(Check(Fp8().Tensor("a.weight", "BF16", {4, 4})),
              StatusIs(Reason::kQuantizationContradicted, HasSubstr("nor is any other")));
}

TEST(GateTensors, RefusesAnFp8WeightWithoutAScale) {
  EXPECT_THAT(Check(Fp8().Tensor("a.weight", "F8_E4M3", {4, 4})),
              StatusIs(Reason::kQuantizationContradicted, HasSubstr("there is no \"a.weight_scale_inv\"")));
}

TEST(GateTensors, RefusesAScaleGridOfAnotherShapeNamingBoth) {
  for (const auto& grid : std::vector<std::vector<int64_t>>{{2, 1}, {1, 2}, {3, 2}, {2}, {}, {3}, {4, 4}}) {
    EXPECT_THAT(Check(Fp8().Tensor("a.weight", "F8_E4M3", {256, 130}).Tensor("a.weight_scale_inv", "F32", grid)),
                StatusIs(Reason::kQuantizationContradicted,
                         AllOf(HasSubstr("F8_E4M3 [256, 130]"), HasSubstr("must be [2, 2]"))));
  }
}

TEST(GateTensors, AcceptsAScaleGridThatIsStoredFlatOrWithoutDimensionsOfOne) {
  for (const auto& grid : std::vector<std::vector<int64_t>>{{4}, {1, 2, 2}, {2, 2, 1}}) {
    EXPECT_THAT(Check(Fp8().Tensor("a.weight", "F8_E4M3", {256, 130}).Tensor("a.weight_scale_inv", "F32", grid)),
                IsOk());
  }
  for (const auto& grid : std::vector<std::vector<int64_t>>{{3}, {1, 3}, {3, 1}}) {
    EXPECT_THAT(Check(Fp8().Tensor("a.weight", "F8_E4M3", {300, 100}).Tensor("a.weight_scale_inv", "F32", grid)),
                IsOk());
  }
}

TEST(GateTensors, RefusesAScaleThatIsNoFloat) {
  EXPECT_THAT(Check(Fp8().BlockFp8("w", {4, 4}, CheckpointBuilder::kSingle, "I32")),
              StatusIs(Reason::kQuantizationContradicted, HasSubstr("must be F32, BF16 or F16")));
  EXPECT_THAT(Check(Fp8().BlockFp8("w", {4, 4}, CheckpointBuilder::kSingle, "F8_E8M0")),
              StatusIs(Reason::kDtypeUnsupported));
}

TEST(GateTensors, RefusesAScaleWithoutAnFp8Weight) {
  EXPECT_THAT(Check(Fp8().BlockFp8("w", {4, 4}).Tensor("x_scale_inv", "F32", {1, 1})),
              StatusIs(Reason::kQuantizationContradicted, HasSubstr("there is no weight \"x\"")));
  EXPECT_THAT(Check(Fp8().BlockFp8("w", {4, 4}).Tensor("x", "BF16", {4, 4}).Tensor("x_scale_inv", "F32", {1, 1})),
              StatusIs(Reason::kQuantizationContradicted, HasSubstr("BF16 [4, 4], not F8_E4M3")));
  EXPECT_THAT(Check(CheckpointBuilder().Tensor("x", "BF16", {4, 4}).Tensor("x_scale_inv", "F32", {1, 1})),
              StatusIs(Reason::kQuantizationContradicted, HasSubstr("scale of a quantized weight")));
}

TEST(GateTensors, RefusesFp8InAnIgnoredModule) {
  EXPECT_THAT(
      Check(Fp8Ignoring("lm_head").BlockFp8("a.weight", {4, 4}).BlockFp8("lm_head.weight", {4, 4})),
      StatusIs(Reason::kQuantizationContradicted, AllOf(HasSubstr("\"lm_head.weight\""), HasSubstr("not quantized"))));
}

TEST(GateTensors, DoesNotTakeGateUpProjForTheIgnoredGate) {
  EXPECT_THAT(Check(Fp8Ignoring("model.layers.0.mlp.gate")
                        .BlockFp8("model.layers.0.mlp.gate_up_proj.weight", {4, 4})
                        .Tensor("model.layers.0.mlp.gate.weight", "BF16", {4, 4})),
              IsOk());
}

TEST(GateTensors, RefusesALayerLeftUnquantizedThatTheConfigDoesNotExcept) {
  const auto builder = [](CheckpointBuilder base) {
    return base.BlockFp8("model.layers.0.mlp.up_proj.weight", {4, 4})
        .Tensor("model.layers.1.mlp.up_proj.weight", "BF16", {4, 4});
  };
  EXPECT_THAT(Check(builder(Fp8())),
              StatusIs(Reason::kQuantizationContradicted, HasSubstr("model.layers.1.mlp.up_proj.weight")));
  EXPECT_THAT(Check(builder(Fp8Ignoring("model.layers.1"))), IsOk());
}

TEST(GateTensors, RefusesFp8ThatIsNoMatrix) {
  EXPECT_THAT(Check(Fp8().Tensor("b", "F8_E4M3", {4}).Tensor("b_scale_inv", "F32", {1})),
              StatusIs(Reason::kQuantizationContradicted, HasSubstr("no matrix")));
}

TEST(GateTensors, RefusesTypesThatCannotBeServedNamingTensorAndType) {
  for (const char* type : {"F4", "F6_E2M3", "F8_E5M2", "F8_E4M3FNUZ", "C64"}) {
    const auto quantization = Check(CheckpointBuilder().Tensor("a", type, {4}));
    EXPECT_THAT(quantization, StatusIs(Reason::kDtypeUnsupported, AllOf(HasSubstr("\"a\""), HasSubstr(type)))) << type;
    EXPECT_THAT(quantization, HasMetadata("dtype", type));
  }
}

TEST(GateTensors, RefusesTensorsThatOnlyOtherMethodsWrite) {
  for (const char* name : {"l.qweight", "l.qzeros", "l.g_idx", "l.weight_packed", "l.weight_scale", "l.input_scale",
                           "l.SCB", "l.gate_up_proj_blocks", "l.W_q", "l.weight.absmax"}) {
    EXPECT_THAT(Check(CheckpointBuilder().Tensor(name, "F32", {4})),
                StatusIs(Reason::kQuantizationContradicted, HasSubstr(name)))
        << name;
    EXPECT_THAT(Check(Fp8().BlockFp8("w", {4, 4}).Tensor(name, "F32", {4})),
                StatusIs(Reason::kQuantizationContradicted))
        << name;
  }
}

TEST(GateTensors, RefusesWeightsOfPackedIntegers) {
  EXPECT_THAT(Check(CheckpointBuilder().Tensor("l.weight", "U32", {4, 4})),
              StatusIs(Reason::kQuantizationContradicted, HasSubstr("packed codes")));
}

}  // namespace
}  // namespace weightbroker
