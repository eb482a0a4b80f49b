#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>

#include "tests/unit/torch/counting_allocator.h"
#include "tests/unit/torch/load_weights.h"
#include "weightbroker/torch.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using ::weightbroker::testing::CheckpointBuilder;
using ::weightbroker::testing::CountAllocations;
using ::weightbroker::testing::LoadWeights;

// Keeps handles of its own, as every module that is written in C++ does.
struct Block : torch::nn::Module {
  explicit Block(at::Device device = at::kMeta, at::ScalarType type = at::kFloat)
      : weight(register_parameter("weight", at::empty({4, 3}, at::TensorOptions(device).dtype(type)))),
        scale(register_buffer("scale", at::empty({4}, at::TensorOptions(device).dtype(type)))) {}
  at::Tensor forward(const at::Tensor& input) const { return at::linear(input, weight) * scale; }

  at::Tensor weight;
  at::Tensor scale;
};

struct Model : torch::nn::Module {
  explicit Model(at::Device device = at::kMeta) : block(register_module("block", std::make_shared<Block>(device))) {}
  std::shared_ptr<Block> block;
};

CheckpointBuilder BlockTensors() {
  return CheckpointBuilder().Tensor("block.weight", "F32", {4, 3}).Tensor("block.scale", "F32", {4});
}

TEST(BindModule, PointsParametersBuffersAndTheModulesOwnHandlesAtTheMapping) {
  const MappedWeights weights = LoadWeights(BlockTensors());
  Model model;

  const Status status = BindModule(model, weights);

  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(model.block->weight.const_data_ptr(), weights.Find("block.weight")->data);
  EXPECT_EQ(model.block->scale.const_data_ptr(), weights.Find("block.scale")->data);
  EXPECT_EQ(model.named_parameters()["block.weight"].const_data_ptr(), weights.Find("block.weight")->data);
  EXPECT_EQ(model.named_buffers()["block.scale"].const_data_ptr(), weights.Find("block.scale")->data);
  EXPECT_TRUE(model.block->weight.device().is_cpu());
  EXPECT_FALSE(model.block->weight.requires_grad());
}

TEST(BindModule, ComputesWhatAModuleWithItsOwnCopyComputes) {
  const MappedWeights weights = LoadWeights(BlockTensors());
  Model bound;
  ASSERT_TRUE(BindModule(bound, weights).ok());
  Model copied(at::kCPU);
  {
    const at::NoGradGuard no_grad;
    copied.block->weight.copy_(*ToTorch(weights, "block.weight"));
    copied.block->scale.copy_(*ToTorch(weights, "block.scale"));
  }
  const at::Tensor input = at::ones({2, 3});

  EXPECT_TRUE(at::equal(at::nan_to_num(bound.block->forward(input)), at::nan_to_num(copied.block->forward(input))));
}

TEST(BindModule, AllocatesNoByteForWeights) {
  const MappedWeights weights =
      LoadWeights(CheckpointBuilder().Tensor("weight", "F32", {4, 3}).Tensor("scale", "F32", {4}));
  const CountAllocations counted;

  Block block;
  const Status status = BindModule(block, weights);

  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(counted.bytes(), 0);
  EXPECT_GT((at::ones({1}).defined(), counted.bytes()), 0) << "nothing is counted at all";
}

TEST(BindModule, KeepsTheMappingThoughTheWeightsHaveGone) {
  Model model;
  std::weak_ptr<const void> mapping;
  {
    const MappedWeights weights = LoadWeights(BlockTensors());
    mapping = weights.KeepAlive();
    ASSERT_TRUE(BindModule(model, weights).ok());
  }
  EXPECT_FALSE(mapping.expired());
  EXPECT_TRUE(model.block->forward(at::ones({2, 3})).defined());

  model.block.reset();
  model.unregister_module("block");

  EXPECT_TRUE(mapping.expired());
}

TEST(BindModule, NamesWhatIsMissingUnexpectedAndMismatchedAndChangesNothing) {
  const MappedWeights weights =
      LoadWeights(CheckpointBuilder().Tensor("block.weight", "BF16", {3, 4}).Tensor("head", "F32", {1}));
  Model model;

  const Status status = BindModule(model, weights);

  EXPECT_EQ(status.reason(), "MODULE_MISMATCH");
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.metadata().at("missing"), "block.scale");
  EXPECT_EQ(status.metadata().at("missing_count"), "1");
  EXPECT_EQ(status.metadata().at("unexpected"), "head");
  EXPECT_EQ(status.metadata().at("mismatched"),
            "block.weight is Float[4,3] in the module and BFloat16[3,4] in the weights");
  EXPECT_THAT(status.message(), HasSubstr("block.scale"));
  EXPECT_TRUE(model.block->weight.is_meta());
}

TEST(BindModule, LeavesOutWhatTheEngineFillsItself) {
  const MappedWeights weights =
      LoadWeights(CheckpointBuilder().Tensor("block.weight", "F32", {4, 3}).Tensor("head", "F32", {1}));
  Model model(at::kCPU);
  const at::Tensor own = model.block->scale;
  const void* const own_address = own.const_data_ptr();
  BindOptions options;
  options.may_be_missing = [](const std::string& name) { return name == "block.scale"; };
  options.may_be_unexpected = [](const std::string& name) { return name == "head"; };

  const Status status = BindModule(model, weights, options);

  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(model.block->scale.const_data_ptr(), own_address);
  EXPECT_EQ(model.block->weight.const_data_ptr(), weights.Find("block.weight")->data);
}

TEST(BindModule, NamesWhatWouldBeLeftWithoutStorage) {
  const MappedWeights weights = LoadWeights(CheckpointBuilder().Tensor("block.weight", "F32", {4, 3}));
  Model model;
  BindOptions options;
  options.may_be_missing = [](const std::string&) { return true; };

  const Status status = BindModule(model, weights, options);

  EXPECT_EQ(status.reason(), "MODULE_MISMATCH");
  EXPECT_EQ(status.metadata().at("unbound"), "block.scale");
}

TEST(BindModule, FindsNamesBehindAPrefixAndLeavesOthersAlone) {
  const MappedWeights weights = LoadWeights(CheckpointBuilder()
                                                .Tensor("model.weight", "F32", {4, 3})
                                                .Tensor("model.scale", "F32", {4})
                                                .Tensor("vision.weight", "F32", {1}));
  Block block;
  BindOptions options;
  options.prefix = "model.";

  const Status status = BindModule(block, weights, options);

  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(block.weight.const_data_ptr(), weights.Find("model.weight")->data);
}

// Two names of one parameter, as a head that is tied to the embedding.
struct TiedModel : torch::nn::Module {
  TiedModel() : embedding(register_parameter("embedding", at::empty({4, 3}, at::kMeta))) {
    head = register_parameter("head", embedding);
  }
  at::Tensor embedding;
  at::Tensor head;
};

TEST(BindModule, BindsATiedParameterThatTheWeightsHaveOnce) {
  const MappedWeights weights = LoadWeights(CheckpointBuilder().Tensor("embedding", "F32", {4, 3}));
  TiedModel model;

  const Status status = BindModule(model, weights);

  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(model.head.const_data_ptr(), weights.Find("embedding")->data);
}

TEST(BindModule, BindsATiedParameterToAnAlias) {
  const MappedWeights weights =
      LoadWeights(CheckpointBuilder().Tensor("embedding", "F32", {4, 3}).Metadata("head", "embedding"));
  TiedModel model;

  EXPECT_TRUE(BindModule(model, weights).ok());
}

TEST(BindModule, RefusesToTieWhatAreTwoTensors) {
  const MappedWeights weights =
      LoadWeights(CheckpointBuilder().Tensor("embedding", "F32", {4, 3}).Tensor("head", "F32", {4, 3}));
  TiedModel model;

  const Status status = BindModule(model, weights);

  EXPECT_EQ(status.reason(), "MODULE_MISMATCH");
  EXPECT_THAT(status.metadata().at("mismatched"), HasSubstr("two tensors"));
}

TEST(BindModule, CutsALongListAndCounts) {
  const MappedWeights weights = LoadWeights(CheckpointBuilder().Tensor("w", "F32", {1}));
  torch::nn::Module model;
  for (int i = 0; i < 25; ++i) model.register_parameter("p" + std::to_string(i), at::empty({1}, at::kMeta));

  const Status status = BindModule(model, weights);

  EXPECT_EQ(status.metadata().at("missing_count"), "25");
  EXPECT_THAT(status.metadata().at("missing"), HasSubstr("and 15 more"));
}

TEST(BindModule, GivesOrdinaryTensorsAlsoInInferenceMode) {
  const MappedWeights weights = LoadWeights(BlockTensors());
  Model model;
  {
    const c10::InferenceMode inference;
    ASSERT_TRUE(BindModule(model, weights).ok());
  }

  EXPECT_FALSE(model.block->weight.is_inference());
}

TEST(BindModule, BindsAgainToOtherWeights) {
  const MappedWeights first = LoadWeights(BlockTensors());
  const MappedWeights second = LoadWeights(BlockTensors());
  Model model;
  ASSERT_TRUE(BindModule(model, first).ok());

  ASSERT_TRUE(BindModule(model, second).ok());

  EXPECT_EQ(model.block->weight.const_data_ptr(), second.Find("block.weight")->data);
}

}  // namespace
}  // namespace weightbroker
