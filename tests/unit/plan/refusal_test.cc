// What does not divide is refused with its numbers, before anything is allocated. Sizes are those of published models.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/support/status_matchers.h"
#include "tests/unit/plan/headers_only.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;

Checkpoint Qwen3Moe(int64_t hidden, int64_t moe_intermediate) {
  HeadersOnly builder("Qwen3MoeForCausalLM", {{"num_hidden_layers", 1}, {"num_experts", 8}});
  for (int expert = 0; expert < 8; ++expert) {
    const std::string prefix = "model.layers.0.mlp.experts." + std::to_string(expert) + ".";
    builder.Fp8(prefix + "gate_proj.weight", moe_intermediate, hidden);
    builder.Fp8(prefix + "up_proj.weight", moe_intermediate, hidden);
    builder.Fp8(prefix + "down_proj.weight", hidden, moe_intermediate);
  }
  return builder.Build();
}

TEST(Refusal, OfQwen3_30B_A3B_AtTp4WhoseExpertsWouldBeCutAt192) {
  const Checkpoint checkpoint = Qwen3Moe(2048, 768);
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 4})),
              AllOf(StatusIs(Reason::kSplitImpossible, HasSubstr("768 among 4 ranks gives parts of 192")),
                    HasMetadata("part", "192"), HasMetadata("length", "768"), HasMetadata("ranks", "4"),
                    HasMetadata("block", "128")));
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 2})), IsOk());
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 4, .expert = 4})), IsOk()) << "whole experts have whole blocks";
}

TEST(Refusal, OfQwen3_235B_AtTp8WhoseExpertsWouldBeCutAt192) {
  const Checkpoint checkpoint = Qwen3Moe(4096, 1536);
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 8}, "fused")),
              AllOf(StatusIs(Reason::kSplitImpossible), HasMetadata("part", "192"), HasMetadata("length", "1536")));
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 4}, "fused")), IsOk());
}

TEST(Refusal, OfDeepSeekV3AtTp32WhoseDenseLayersWouldBeCutAt576) {
  const Checkpoint checkpoint = HeadersOnly("DeepseekV3ForCausalLM", {{"num_hidden_layers", 1}})
                                    .Fp8("model.layers.0.mlp.up_proj.weight", 18'432, 7168)
                                    .Build();
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 32})),
              AllOf(StatusIs(Reason::kSplitImpossible), HasMetadata("part", "576"), HasMetadata("length", "18432")));
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 16})), IsOk());
}

TEST(Refusal, OfGlm4_9B_AtTp2WhoseProjectionsWouldBeCutAt6848) {
  const nlohmann::json config = {{"num_hidden_layers", 1}, {"intermediate_size", 13'696}};
  const Checkpoint checkpoint = HeadersOnly("Glm4ForCausalLM", config)
                                    .Tensor("model.layers.0.mlp.gate_up_proj.weight", "BF16", {27'392, 4096})
                                    .Build();
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 2}, "hf", "fp8_block")),
              AllOf(StatusIs(Reason::kSplitImpossible), HasMetadata("part", "6848"), HasMetadata("length", "27392")));
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 2})), IsOk()) << "unquantized, it has no blocks";
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 1}, "fused", "fp8_block")), IsOk()) << "13696 is 107 blocks";
}

TEST(Refusal, OfARaggedRowParallelWeight) {
  const Checkpoint checkpoint = HeadersOnly("Glm4ForCausalLM", {{"num_hidden_layers", 1}})
                                    .Fp8("model.layers.0.mlp.down_proj.weight", 4096, 13'696)
                                    .Build();
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 2})),
              AllOf(StatusIs(Reason::kSplitImpossible, HasSubstr("13696 among 2 ranks")), HasMetadata("part", "6848")));
}

TEST(Refusal, OfTwoTimes80FusedWhetherOrNotTheSumDivides) {
  for (const int64_t each : {80, 64}) {  // 64 + 64 is a block, but not of one of them
    const Checkpoint checkpoint = HeadersOnly("LlamaForCausalLM", {{"num_hidden_layers", 1}})
                                      .Tensor("model.layers.0.mlp.gate_proj.weight", "BF16", {each, 256})
                                      .Tensor("model.layers.0.mlp.up_proj.weight", "BF16", {each, 256})
                                      .Build();
    EXPECT_THAT(PlanAll(checkpoint, SpecFor({}, "fused", "fp8_block")),
                AllOf(StatusIs(Reason::kSplitImpossible, HasSubstr("a part of " + std::to_string(each))),
                      HasMetadata("part", std::to_string(each)), HasMetadata("block", "128")));
    EXPECT_THAT(PlanAll(checkpoint, SpecFor({}, "hf", "fp8_block")), IsOk()) << "apart, each has its own blocks";
    EXPECT_THAT(PlanAll(checkpoint, SpecFor({}, "fused")), IsOk());
  }
}

TEST(Refusal, Of28HeadsAtTp8) {
  const nlohmann::json config = {
      {"num_hidden_layers", 1}, {"num_attention_heads", 28}, {"num_key_value_heads", 4}, {"hidden_size", 3584}};
  const Checkpoint checkpoint = HeadersOnly("Qwen2ForCausalLM", config)
                                    .Tensor("model.layers.0.self_attn.q_proj.weight", "BF16", {3584, 3584})
                                    .Build();
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 8})),
              AllOf(StatusIs(Reason::kSplitImpossible, AllOf(HasSubstr("28 heads do not divide among 8 ranks"),
                                                             HasSubstr("whole number of heads of 128"))),
                    HasMetadata("count", "28"), HasMetadata("ranks", "8")));
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 4})), IsOk());
}

TEST(Refusal, OfKvHeadsThatNeitherDivideNorRepeat) {
  const nlohmann::json config = {
      {"num_hidden_layers", 1}, {"num_attention_heads", 24}, {"num_key_value_heads", 3}, {"head_dim", 128}};
  const Checkpoint checkpoint = HeadersOnly("LlamaForCausalLM", config)
                                    .Tensor("model.layers.0.self_attn.k_proj.weight", "BF16", {384, 1024})
                                    .Build();
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 4})),
              AllOf(StatusIs(Reason::kSplitImpossible), HasMetadata("count", "3"), HasMetadata("ranks", "4")));
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 6})), IsOk());
}

TEST(Refusal, OfANormThatWouldGetAFractionOfAKvHead) {
  const nlohmann::json config = {
      {"num_hidden_layers", 1}, {"num_attention_heads", 48}, {"num_key_value_heads", 8}, {"head_dim", 128}};
  const Checkpoint checkpoint = HeadersOnly("MiniMaxM2ForCausalLM", config)
                                    .Tensor("model.layers.0.self_attn.k_norm.weight", "BF16", {1024})
                                    .Build();
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 16})),
              AllOf(StatusIs(Reason::kSplitImpossible, HasSubstr("1024 / 16")), HasMetadata("count", "8"),
                    HasMetadata("ranks", "16"), HasMetadata("unit_size", "128")));
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 8})), IsOk());
}

TEST(Refusal, OfExpertsThatDoNotDivide) {
  EXPECT_THAT(
      PlanAll(Qwen3Moe(2048, 768), SpecFor({.tensor = 3, .expert = 3})),
      AllOf(StatusIs(Reason::kSplitImpossible, HasSubstr("8 experts do not divide")), HasMetadata("ranks", "3")));
}

TEST(Refusal, OfExpertGroupsForAModelWithoutExperts) {
  const Checkpoint checkpoint =
      HeadersOnly("LlamaForCausalLM", {{"num_hidden_layers", 1}}).Tensor("model.norm.weight", "BF16", {16}).Build();
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 2, .expert = 2})),
              StatusIs(Reason::kSplitImpossible, HasSubstr("no experts")));
}

TEST(Refusal, OfMoreStagesThanLayers) {
  const Checkpoint checkpoint = HeadersOnly("LlamaForCausalLM", {{"num_hidden_layers", 2}})
                                    .Tensor("model.layers.0.input_layernorm.weight", "BF16", {16})
                                    .Build();
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.pipeline = 3})),
              AllOf(StatusIs(Reason::kSplitImpossible, HasSubstr("2 layers are too few")), HasMetadata("ranks", "3")));
}

TEST(Refusal, OfAVocabularyThatDoesNotDivideOnceItIsFilledUp) {
  const Checkpoint checkpoint = HeadersOnly("LlamaForCausalLM", {{"num_hidden_layers", 1}})
                                    .Tensor("model.embed_tokens.weight", "BF16", {100, 16})
                                    .Build();
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 3})),
              AllOf(StatusIs(Reason::kSplitImpossible), HasMetadata("count", "128"), HasMetadata("ranks", "3")));
}

TEST(Refusal, OfQueriesKeysAndValuesThatAreStoredByKvGroup) {
  const nlohmann::json config = {{"num_hidden_layers", 1},
                                 {"num_attention_heads", 128},
                                 {"hidden_size", 8192},
                                 {"new_decoder_architecture", true},
                                 {"multi_query", true}};
  const Checkpoint checkpoint =
      HeadersOnly("FalconForCausalLM", config)
          .Tensor("transformer.h.0.self_attention.query_key_value.weight", "BF16", {9216, 8192})
          .Build();
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 2})),
              AllOf(StatusIs(Reason::kSplitImpossible, HasSubstr("stored by KV group")),
                    HasMetadata("key", "new_decoder_architecture")));
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({})), IsOk());
}

TEST(Refusal, OfFusedStorageOfAnotherLengthThanItsPartsHave) {
  const nlohmann::json config = {
      {"num_hidden_layers", 1}, {"num_attention_heads", 32}, {"num_key_value_heads", 8}, {"hidden_size", 3072}};
  const Checkpoint checkpoint = HeadersOnly("Phi3ForCausalLM", config)
                                    .Tensor("model.layers.0.self_attn.qkv_proj.weight", "BF16", {9216, 3072})
                                    .Build();
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 2})),
              AllOf(StatusIs(Reason::kArchitectureMismatch, HasSubstr("9216")), HasMetadata("expected", "4608")));
}

TEST(Refusal, OfAnArchitectureThatNoFileDescribesNamingItAndHowToAddOne) {
  const Checkpoint checkpoint = HeadersOnly("NovelForCausalLM", {}).Tensor("a", "BF16", {16}).Build();
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({})), IsOk()) << "as it is, it needs no description";
  for (const v1::WeightSpec& spec :
       {SpecFor({.tensor = 2}), SpecFor({.pipeline = 2}), SpecFor({}, "fused"), SpecFor({}, "hf", "fp8_block")}) {
    EXPECT_THAT(PlanAll(checkpoint, spec),
                AllOf(StatusIs(Reason::kArchitectureUnknown,
                               AllOf(HasSubstr("NovelForCausalLM"), HasSubstr("--architecture_dir"))),
                      HasMetadata("architectures", "NovelForCausalLM")));
  }
}

TEST(Refusal, OfMoreRanksThanAnArchitectureAllows) {
  const Checkpoint checkpoint =
      HeadersOnly("BertModel", {{"num_hidden_layers", 1}}).Tensor("pooler.dense.weight", "F32", {8, 8}).Build();
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 2})),
              AllOf(StatusIs(Reason::kSplitImpossible), HasMetadata("allowed", "1"), HasMetadata("ranks", "2")));
}

TEST(Refusal, OfATensorThatTheArchitectureDoesNotDescribe) {
  const Checkpoint checkpoint = HeadersOnly("LlamaForCausalLM", {{"num_hidden_layers", 1}})
                                    .Tensor("model.layers.0.self_attn.gate.weight", "BF16", {16})
                                    .Build();
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 2})),
              AllOf(StatusIs(Reason::kArchitectureMismatch, HasSubstr("self_attn.gate.weight")),
                    HasMetadata("architecture_file", "llama.json")));
}

TEST(Refusal, OfALayerThatTheConfigDoesNotHave) {
  const Checkpoint checkpoint = HeadersOnly("LlamaForCausalLM", {{"num_hidden_layers", 1}})
                                    .Tensor("model.layers.1.input_layernorm.weight", "BF16", {16})
                                    .Build();
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 2})),
              StatusIs(Reason::kArchitectureMismatch, HasSubstr("layer 1")));
}

TEST(Refusal, OfAConfigWithoutANumberThatTheSplitNeeds) {
  const Checkpoint checkpoint = HeadersOnly("LlamaForCausalLM", {{"num_hidden_layers", 1}})
                                    .Tensor("model.layers.0.self_attn.q_proj.weight", "BF16", {64, 16})
                                    .Build();
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 2})),
              StatusIs(Reason::kConfigMalformed, HasSubstr("num_attention_heads")));
}

TEST(Refusal, OfAFusedTensorOfWhichAPartIsMissing) {
  const nlohmann::json config = {
      {"num_hidden_layers", 1}, {"num_attention_heads", 2}, {"num_key_value_heads", 2}, {"head_dim", 16}};
  const Checkpoint checkpoint = HeadersOnly("LlamaForCausalLM", config)
                                    .Tensor("model.layers.0.self_attn.q_proj.weight", "BF16", {32, 16})
                                    .Tensor("model.layers.0.self_attn.v_proj.weight", "BF16", {32, 16})
                                    .Build();
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({}, "fused")), StatusIs(Reason::kArchitectureMismatch, HasSubstr("k_proj")));
}

TEST(Refusal, OfAFusedTensorOfWhichOnlySomePartsAreQuantized) {
  const Checkpoint checkpoint = HeadersOnly("LlamaForCausalLM", {{"num_hidden_layers", 1}})
                                    .Tensor("model.layers.0.mlp.gate_proj.weight", "BF16", {128, 256})
                                    .Tensor("model.layers.0.mlp.up_proj.weight", "BF16", {128, 256})
                                    .Build();
  v1::WeightSpec spec = SpecFor({}, "fused", "fp8_block");
  spec.add_unquantized_modules("gate_proj");
  EXPECT_THAT(PlanAll(checkpoint, spec), StatusIs(Reason::kSplitImpossible, HasSubstr("to be quantized")));
}

TEST(Refusal, ToQuantizeAModelOfWhichNothingIsQuantized) {
  const Checkpoint checkpoint =
      HeadersOnly("LlamaForCausalLM", {{"num_hidden_layers", 1}}).Tensor("model.norm.weight", "BF16", {16}).Build();
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({}, "hf", "fp8_block")),
              StatusIs(Reason::kQuantizationUnsupported, HasSubstr("llama.json")));
}

}  // namespace
}  // namespace weightbroker
