#include "common/plan/split.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/topology.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/plan/headers_only.h"

namespace weightbroker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;

std::vector<int64_t> LayerCounts(int64_t layers, int64_t stages) {
  std::vector<int64_t> counts;
  int64_t next = 0;
  for (int64_t stage = 0; stage < stages; ++stage) {
    const LayerRange range = LayersOf(layers, {stage, stages});
    EXPECT_EQ(range.begin, next);
    counts.push_back(range.end - range.begin);
    next = range.end;
  }
  EXPECT_EQ(next, layers);
  return counts;
}

TEST(Layers, AreSplitEvenlyAndWhatIsLeftGoesToTheStagesBeforeTheLast) {
  EXPECT_THAT(LayerCounts(61, 2), ElementsAre(31, 30));
  EXPECT_THAT(LayerCounts(61, 4), ElementsAre(15, 15, 16, 15));
  EXPECT_THAT(LayerCounts(63, 4), ElementsAre(16, 16, 16, 15));
  EXPECT_THAT(LayerCounts(64, 4), ElementsAre(16, 16, 16, 16));
  EXPECT_THAT(LayerCounts(5, 1), ElementsAre(5));
  EXPECT_THAT(LayerCounts(3, 3), ElementsAre(1, 1, 1));
}

TEST(Places, NumberTensorRanksInnermostAndStagesOutermost) {
  const v1::WeightSpec spec = *CompleteSpec(SpecFor({.tensor = 4, .pipeline = 2, .expert = 2, .data = 2}));
  const RankPlaces places = PlacesOf(spec, 8 + 4 + 3);  // second stage, second replica, last tensor rank
  EXPECT_EQ(places.stage.index, 1);
  EXPECT_EQ(places.tensor.index, 3);
  EXPECT_EQ(places.tensor.size, 4);
  EXPECT_EQ(places.expert_group.index, 1);
  EXPECT_EQ(places.expert_part.index, 3);
  EXPECT_EQ(places.expert_part.size, 4);
}

TEST(Numbers, AreWorkedOutFromTheConfigAndItsSections) {
  const nlohmann::json config = {{"hidden_size", 4096}, {"text_config", {{"heads", 32}, {"hidden_size", 1}}}};
  ConfigNumbers numbers(config, {"", "text_config"});
  numbers.Define("head_size", {"head_dim", "hidden_size / heads"});
  EXPECT_EQ(*numbers.Evaluate("head_size"), 128);
  EXPECT_EQ(*numbers.Evaluate("hidden_size + 2 * heads * head_size"), 4096 + 2 * 32 * 128);
  EXPECT_THAT(numbers.Evaluate("hidden_size / 3"), StatusIs(Reason::kConfigMalformed, HasSubstr("no multiple of 3")));
  EXPECT_THAT(numbers.Evaluate("experts"), StatusIs(Reason::kConfigMalformed, HasSubstr("experts")));
}

TEST(Numbers, MustFit63BitsThroughout) {
  const nlohmann::json config = nlohmann::json::object();
  ConfigNumbers numbers(config, {""});
  for (const char* expression : {"9223372036854775807 + 1", "9223372036854775807 * 2", "1 + 9223372036854775807",
                                 "4611686018427387904 * 1 + 4611686018427387904 * 1"}) {
    EXPECT_THAT(numbers.Evaluate(expression), StatusIs(Reason::kConfigMalformed, HasSubstr("too large"))) << expression;
  }
  EXPECT_EQ(*numbers.Evaluate("9223372036854775806 + 1"), INT64_MAX);
}

TEST(Numbers, MayHaveTheNameOfTheKeyThatTheyAre) {
  const nlohmann::json config = {{"experts", 8}};
  ConfigNumbers numbers(config, {""});
  numbers.Define("experts", {"experts"});
  EXPECT_EQ(*numbers.Evaluate("experts"), 8);
}

TEST(Numbers, RefuseWhatIsNoPositiveInteger) {
  for (const nlohmann::json& value :
       {nlohmann::json(0), nlohmann::json(-1), nlohmann::json(1.5), nlohmann::json("8")}) {
    const nlohmann::json config = {{"heads", value}};
    EXPECT_THAT(ConfigNumbers(config, {""}).Evaluate("heads"), StatusIs(Reason::kConfigMalformed)) << value;
  }
}

TEST(Numbers, NameWhatWasLookedForWhereNothingWasFound) {
  const nlohmann::json config = nlohmann::json::object();
  ConfigNumbers numbers(config, {""});
  numbers.Define("head_size", {"head_dim", "hidden_size / heads"});
  EXPECT_THAT(numbers.Evaluate("head_size"),
              StatusIs(Reason::kConfigMalformed, HasSubstr("head_dim or hidden_size / heads")));
}

TEST(Numbers, KnowWhatIsNoExpression) {
  for (const char* text : {"", "a +", "+ a", "a b", "a - b", "a.b", "(a)"}) {
    EXPECT_FALSE(ConfigNumbers::IsWellFormed(text)) << text;
  }
  for (const char* text : {"a", "12", "a+b*c / 2"}) EXPECT_TRUE(ConfigNumbers::IsWellFormed(text)) << text;
}

TEST(Split, SharesKvHeadsAmongNeighbouringRanks) {
  const nlohmann::json config = {{"kv", 2}};
  const ConfigNumbers numbers(config, {""});
  TensorRule rule;
  rule.split = Split::kColumn;
  rule.parts = {{.count = "kv", .size = "128", .replicate = true}};
  for (int64_t rank = 0; rank < 8; ++rank) {
    const auto axis = SliceAxis(rule, {rank, 8}, 256, numbers, "k");
    ASSERT_THAT(axis, IsOk());
    EXPECT_EQ(axis->slices[0].begin, rank / 4 * 128);
    EXPECT_EQ(axis->length, 128);
  }
}

TEST(Split, FillsAVocabularyUpWithZerosAtTheEnd) {
  TensorRule rule;
  rule.split = Split::kVocab;
  const nlohmann::json config;
  const ConfigNumbers numbers(config, {""});
  std::vector<int64_t> begins;
  std::vector<int64_t> ends;
  for (int64_t rank = 0; rank < 8; ++rank) {
    const auto axis = SliceAxis(rule, {rank, 8}, 130, numbers, "embedding");  // filled up to 192
    ASSERT_THAT(axis, IsOk());
    EXPECT_EQ(axis->length, 24);
    begins.push_back(axis->slices[0].begin);
    ends.push_back(axis->slices[0].end);
  }
  EXPECT_THAT(begins, ElementsAre(0, 24, 48, 72, 96, 120, 130, 130));
  EXPECT_THAT(ends, ElementsAre(24, 48, 72, 96, 120, 130, 130, 130));
}

TEST(Plan, LeavesMtpLayersOutWhereItIsAskedTo) {
  const nlohmann::json config = {{"num_hidden_layers", 1}, {"num_nextn_predict_layers", 1}};
  const Checkpoint checkpoint = HeadersOnly("DeepseekV3ForCausalLM", config)
                                    .Tensor("model.layers.0.input_layernorm.weight", "BF16", {16})
                                    .Tensor("model.layers.1.enorm.weight", "BF16", {16})
                                    .Build();
  v1::WeightSpec spec = SpecFor({.tensor = 2});
  EXPECT_NE(FindTensor(PlanAll(checkpoint, spec)->shards[0], "model.layers.1.enorm.weight"), nullptr);
  spec.set_mtp_layers("drop");
  const auto plan = PlanAll(checkpoint, spec);
  ASSERT_THAT(plan, IsOk());
  EXPECT_EQ(FindTensor(plan->shards[0], "model.layers.1.enorm.weight"), nullptr);
  EXPECT_EQ(plan->read_bytes, 32);
}

TEST(Plan, ReadsEachByteOnceHoweverManyRanksWantIt) {
  const Checkpoint checkpoint = HeadersOnly("LlamaForCausalLM", {{"num_hidden_layers", 1}})
                                    .Tensor("model.layers.0.mlp.down_proj.weight", "BF16", {64, 64})
                                    .Tensor("model.norm.weight", "BF16", {64})
                                    .Build();
  const auto plan = PlanAll(checkpoint, SpecFor({.tensor = 4}));
  ASSERT_THAT(plan, IsOk());
  EXPECT_EQ(plan->read_bytes, checkpoint.total_bytes);
  EXPECT_GT(plan->shards[0].read_bytes, checkpoint.total_bytes / 4);
}

TEST(Plan, GivesOneOfSeveralRanksWhenOnlyThatIsAskedFor) {
  const Checkpoint checkpoint = HeadersOnly("LlamaForCausalLM", {{"num_hidden_layers", 1}})
                                    .Tensor("model.layers.0.mlp.up_proj.weight", "BF16", {64, 64})
                                    .Build();
  const v1::WeightSpec spec = *CompleteSpec(SpecFor({.tensor = 4}));
  const auto plan = PlanNode({.checkpoint = checkpoint,
                              .spec = spec,
                              .quantization = {},
                              .architectures = ArchitectureSet::Embedded(),
                              .ranks = {3}});
  ASSERT_THAT(plan, IsOk());
  ASSERT_EQ(plan->shards.size(), 1u);
  EXPECT_EQ(plan->shards[0].rank, 3);
  EXPECT_EQ(plan->read_bytes, checkpoint.total_bytes / 4);
  EXPECT_EQ(plan->shards[0].tensors[0].pieces[0].source_offset, 48 * 64);
}

}  // namespace
}  // namespace weightbroker
