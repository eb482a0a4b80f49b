#include "common/synthetic/model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "common/checkpoint/checkpoint.h"
#include "common/plan/architecture.h"
#include "common/plan/plan.h"
#include "common/quant/gate.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::TemporaryFolder;

bool NeedsOneRank(const std::string& model) { return model == "bert"; }
bool HasFp8Weights(const std::string& model) { return model != "bert"; }

// Whether the service could serve it, split over two ranks and fused: names and shapes are what the planner expects.
absl::Status PlanFused(const std::string& folder, int32_t ranks) {
  const auto checkpoint = OpenCheckpoint(RealFileSystem(), folder);
  if (!checkpoint.ok()) return checkpoint.status();
  const auto quantization = CheckQuantization(*checkpoint);
  if (!quantization.ok()) return quantization.status();
  v1::WeightSpec spec;
  spec.set_tensor_parallel_size(ranks);
  spec.set_layout("fused");
  const auto complete = CompleteSpec(spec);
  if (!complete.ok()) return complete.status();
  return PlanNode({.checkpoint = *checkpoint,
                   .spec = *complete,
                   .quantization = *quantization,
                   .architectures = ArchitectureSet::Embedded(),
                   .ranks = AllRanks(*complete)})
      .status();
}

class ModelTest : public ::testing::TestWithParam<ModelName> {
 protected:
  const std::string& label() const { return GetParam().label; }
  int32_t ranks() const { return NeedsOneRank(label()) ? 1 : 2; }
};

TEST_P(ModelTest, IsWhatThePlannerSplits) {
  const TemporaryFolder dir;
  const auto draft = DraftModel({.model = label()});
  ASSERT_THAT(draft, IsOk());
  ASSERT_THAT(WriteCheckpoint(*draft, dir / "model", {.sparse = true}), IsOk());
  EXPECT_THAT(PlanFused(dir / "model", ranks()), IsOk());
}

TEST_P(ModelTest, IsWhatThePlannerSplitsInFp8) {
  if (!HasFp8Weights(label())) GTEST_SKIP() << "has no weights that are quantized";
  const TemporaryFolder dir;
  const auto draft = DraftModel({.model = label(), .fp8 = true, .shard_count = 3});
  ASSERT_THAT(draft, IsOk());
  ASSERT_THAT(WriteCheckpoint(*draft, dir / "model", {.sparse = true}), IsOk());
  EXPECT_THAT(PlanFused(dir / "model", ranks()), IsOk());
}

TEST_P(ModelTest, HasThePublishedModelsNumbers) {
  const TemporaryFolder dir;
  ModelRequest request{.model = label(), .published = true, .layers = 4};
  const auto draft = DraftModel(request);
  ASSERT_THAT(draft, IsOk());
  ASSERT_THAT(WriteCheckpoint(*draft, dir / "model", {.sparse = true}), IsOk());
  EXPECT_THAT(PlanFused(dir / "model", 1), IsOk());
}

INSTANTIATE_TEST_SUITE_P(Models, ModelTest, ::testing::ValuesIn(ListModels()),
                         [](const auto& model) { return model.param.label; });

TEST(Models, AreThoseThatThePlannerKnows) {
  for (const std::string& architecture : ArchitectureSet::Embedded().Names()) {
    EXPECT_THAT(DraftModel({.model = architecture}), IsOk()) << architecture;
  }
}

TEST(DraftModel, HasAsManyLayersAndExpertsAsAreAskedFor) {
  const auto draft = DraftModel({.model = "mixtral", .layers = 3, .experts = 5});
  ASSERT_THAT(draft, IsOk());
  int64_t experts = 0;
  for (const TensorDraft& tensor : draft->shards[0].tensors) experts += tensor.name.ends_with(".w1.weight") ? 1 : 0;
  EXPECT_EQ(experts, 15);
  EXPECT_EQ(draft->config["num_hidden_layers"], 3);
  EXPECT_EQ(draft->config["num_local_experts"], 5);
}

TEST(DraftModel, ComesAsNearToItsBytesAsWholeLayersDo) {
  const auto one = DraftModel({.model = "deepseek", .layers = 2});
  const auto two = DraftModel({.model = "deepseek", .layers = 3});
  ASSERT_THAT(one, IsOk());
  ASSERT_THAT(two, IsOk());
  const int64_t layer_bytes = two->total_bytes() - one->total_bytes();

  const auto draft = DraftModel({.model = "deepseek", .bytes = 100'000'000});

  ASSERT_THAT(draft, IsOk());
  EXPECT_LE(std::abs(draft->total_bytes() - 100'000'000), layer_bytes / 2);
}

TEST(DraftModel, TakesOtherNumbersOfTheConfig) {
  const auto draft = DraftModel({.model = "llama", .numbers = {{"vocab_size", 1000}}});
  ASSERT_THAT(draft, IsOk());
  const auto& tensors = draft->shards[0].tensors;
  const auto embedding = std::find_if(tensors.begin(), tensors.end(), [](const TensorDraft& tensor) {
    return tensor.name == "model.embed_tokens.weight";
  });
  ASSERT_NE(embedding, tensors.end());
  EXPECT_EQ(embedding->shape[0], 1000);
}

TEST(DraftModel, LeavesOutTheHeadThatIsTiedToTheEmbedding) {
  const auto draft = DraftModel({.model = "gemma2"});
  ASSERT_THAT(draft, IsOk());
  for (const TensorDraft& tensor : draft->shards[0].tensors) EXPECT_NE(tensor.name, "lm_head.weight");
}

TEST(DraftModel, RefusesAModelThatThereIsNotNamingThoseThereAre) {
  EXPECT_THAT(DraftModel({.model = "gpt2"}), StatusIs(Reason::kArchitectureUnknown, HasSubstr("llama")));
}

TEST(DraftModel, RefusesWhatDoesNotFitTheModel) {
  for (const ModelRequest& request :
       {ModelRequest{.model = "llama", .experts = 4}, ModelRequest{.model = "bert", .fp8 = true},
        ModelRequest{.model = "llama", .numbers = {{"no_such_key", 1}}},
        ModelRequest{.model = "llama", .shard_count = 1000}}) {
    EXPECT_THAT(DraftModel(request), StatusIs(Reason::kInvalidArgument));
  }
}

}  // namespace
}  // namespace weightbroker
