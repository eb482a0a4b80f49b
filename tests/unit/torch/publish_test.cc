// Publishing from torch to a real service in host memory, and what every later start gets back.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/unit/torch/publish_service.h"
#include "weightbroker/client.h"
#include "weightbroker/torch.h"

namespace weightbroker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::weightbroker::testing::PublishService;

// A layer that ties one parameter to another, and computes a buffer.
struct Layer : torch::nn::Module {
  explicit Layer(at::Device device = at::kCPU) {
    const at::TensorOptions bf16 = at::TensorOptions(device).dtype(at::kBFloat16);
    weight = register_parameter("weight", at::zeros({4, 6}, bf16));
    tied = register_parameter("tied", weight);
    table = register_buffer("table", at::zeros({8}, at::TensorOptions(device).dtype(at::kFloat)));
    inner = register_module("inner", std::make_shared<Inner>(device));
  }

  struct Inner : torch::nn::Module {
    explicit Inner(at::Device device)
        : mask(register_buffer("mask", at::zeros({3}, at::TensorOptions(device).dtype(at::kBool)))) {}
    at::Tensor mask;
  };

  at::Tensor weight;
  at::Tensor tied;
  at::Tensor table;
  std::shared_ptr<Inner> inner;
};

void FillLayer(Layer& layer) {
  const c10::InferenceMode inference;
  layer.weight.copy_(at::arange(24).view({4, 6}));
  layer.table.copy_(at::arange(8).to(at::kFloat) / 8);
  layer.inner->mask[1] = true;
}

class TorchPublish : public ::testing::Test {
 protected:
  WeightSpec Spec() const {
    WeightSpec spec;
    spec.model = service_.model();
    spec.layout = "engine";
    spec.engine = "torch_test";
    spec.engine_version = "1";
    return spec;
  }

  Client MakeClient() const {
    ClientOptions options;
    options.mode = Mode::kClient;
    options.torch_version = "any";
    options.socket_path = service_.socket();
    return *Client::Create(options);
  }

  // As the publisher has it, and as a later start has it.
  MappedWeights Publish(const Client::Loader& load) {
    const auto first = MakeClient().AttachOrPublish(Spec(), load, options_);
    EXPECT_TRUE(first.ok()) << first.status().ToString();
    auto second = MakeClient().AttachOrPublish(
        Spec(), [](Publisher&) { return Status(StatusCode::kInternal, "UNWANTED", "it is there"); });
    EXPECT_TRUE(second.ok()) << second.status().ToString();
    EXPECT_TRUE(second->Verify().ok());
    return *std::move(second);
  }

  MappedWeights PublishAll(const std::vector<NamedTensor>& tensors) {
    return Publish([&](Publisher& publisher) { return PublishTensors(publisher, tensors); });
  }

  Status FailureOf(const NamedTensor& tensor) {
    const auto weights =
        MakeClient().AttachOrPublish(Spec(), [&](Publisher& publisher) { return PublishTensors(publisher, {tensor}); });
    return weights.status();
  }

  const PublishService service_;
  PublishOptions options_;
};

at::Tensor Get(const MappedWeights& weights, const std::string& name) {
  auto tensor = ToTorch(weights, name);
  EXPECT_TRUE(tensor.ok()) << tensor.status().ToString();
  return *tensor;
}

TEST_F(TorchPublish, TensorsOfEveryLayoutComeBackExactly) {
  const at::Tensor matrix = at::arange(24, at::kFloat).view({4, 6}).to(at::kBFloat16);
  const at::Tensor scores = at::arange(32, at::kFloat).view({2, 16}).to(at::kFloat8_e4m3fn);
  const std::map<std::string, at::Tensor> published = {
      {"contiguous", at::arange(10)},
      {"transposed", matrix.clone().t()},
      {"every_other_column", matrix.clone().slice(1, 0, 6, 2)},
      {"channels_last", at::rand({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast)},
      {"expanded", at::rand({3, 1}).expand({3, 4})},
      {"scalar", at::scalar_tensor(2.5)},
      {"nothing", at::empty({3, 0, 2})},
      {"float8", scores},
      {"flags", at::arange(5).remainder(2).to(at::kBool)},
      {"negated_when_read", at::_neg_view(at::arange(4, at::kFloat))},
      {"wanting_gradients", at::rand({2, 2}).requires_grad_(true)},
      {"small_part_of_something_large", at::rand({1000, 1000})[17].slice(0, 3, 8)}};
  std::vector<NamedTensor> tensors;
  for (const auto& [name, tensor] : published) tensors.push_back({name, tensor, TensorKind::kParameter, {}});

  const MappedWeights weights = PublishAll(tensors);

  ASSERT_EQ(weights.tensors().size(), published.size());
  for (const auto& [name, tensor] : published) {
    SCOPED_TRACE(name);
    const at::Tensor found = Get(weights, name);
    EXPECT_EQ(found.scalar_type(), tensor.scalar_type());
    EXPECT_EQ(found.sizes(), tensor.sizes());
    EXPECT_TRUE(tensor.numel() == 0 || found.strides() == tensor.strides()) << found.strides();
    EXPECT_TRUE(at::equal(found.to(at::kFloat), tensor.detach().to(at::kFloat)));
  }
  EXPECT_LE(weights.Find("small_part_of_something_large")->size_bytes, 20);
}

TEST_F(TorchPublish, WhatSharesMemoryIsPublishedOnceWhicheverComesFirst) {
  const at::Tensor whole = at::arange(24, at::kFloat).view({4, 6});
  const MappedWeights weights = PublishAll({{"a_part", whole[1], TensorKind::kBuffer, {}},
                                            {"another_part", whole.t().slice(0, 2, 4), TensorKind::kBuffer, {}},
                                            {"as_bytes", whole[2].view(at::kByte), TensorKind::kBuffer, {}},
                                            {"same", whole, TensorKind::kParameter, {}},
                                            {"whole", whole, TensorKind::kParameter, {}}});

  EXPECT_EQ(weights.total_bytes(), 24 * 4);
  EXPECT_EQ(weights.Find("whole")->alias_of, "same");
  for (const char* part : {"a_part", "another_part", "as_bytes"})
    EXPECT_EQ(weights.Find(part)->alias_of, "same") << part;
  EXPECT_TRUE(at::equal(Get(weights, "a_part"), whole[1]));
  EXPECT_TRUE(at::equal(Get(weights, "another_part"), whole.t().slice(0, 2, 4)));
  EXPECT_THAT(Get(weights, "another_part").strides(), ElementsAre(1, 6));
  EXPECT_TRUE(at::equal(Get(weights, "as_bytes"), whole[2].view(at::kByte)));
  EXPECT_EQ(weights.Find("a_part")->data, weights.Find("same")->data + 24);
}

TEST_F(TorchPublish, WhatOnlyOverlapsIsPublishedTwice) {
  const at::Tensor base = at::arange(10, at::kFloat);
  const MappedWeights weights = PublishAll({{"head", base.slice(0, 0, 6), TensorKind::kParameter, {}},
                                            {"tail", base.slice(0, 4, 10), TensorKind::kParameter, {}}});

  EXPECT_TRUE(weights.Find("tail")->alias_of.empty());
  EXPECT_TRUE(at::equal(Get(weights, "head"), base.slice(0, 0, 6)));
  EXPECT_TRUE(at::equal(Get(weights, "tail"), base.slice(0, 4, 10)));
}

TEST_F(TorchPublish, AModuleComesBackWithItsKindsAndMetadataAndBinds) {
  Layer layer;
  FillLayer(layer);
  PublishModuleOptions module;
  module.prefix = "model.";
  module.metadata = [](const std::string& name) -> std::map<std::string, std::string> {
    if (name != "weight") return {};
    return {{"scale_format", "ue8m0"}, {"unknown.to.everybody", "\x01 \xc3\xa9"}};
  };
  module.is_non_persistent = [](const std::string& name) { return name == "inner.mask"; };
  PublishTimes times;
  options_.on_published = [&](const PublishTimes& published) { times = published; };

  const MappedWeights weights = Publish([&](Publisher& publisher) { return PublishModule(publisher, layer, module); });

  EXPECT_EQ(times.copied_bytes, 24 * 2 + 8 * 4 + 3);
  ASSERT_EQ(weights.tensors().size(), 4U);
  EXPECT_EQ(weights.Find("model.weight")->kind, TensorKind::kParameter);
  EXPECT_THAT(weights.Find("model.weight")->metadata,
              ElementsAre(Pair("scale_format", "ue8m0"), Pair("unknown.to.everybody", "\x01 \xc3\xa9")));
  EXPECT_EQ(weights.Find("model.table")->kind, TensorKind::kBuffer);
  EXPECT_EQ(weights.Find("model.inner.mask")->kind, TensorKind::kNonPersistentBuffer);
  EXPECT_EQ(weights.Find("model.tied")->data, weights.Find("model.weight")->data);

  Layer later(at::kMeta);
  BindOptions bind;
  bind.prefix = "model.";
  const Status bound = BindModule(later, weights, bind);
  ASSERT_TRUE(bound.ok()) << bound.ToString();
  EXPECT_TRUE(at::equal(later.weight, layer.weight));
  EXPECT_TRUE(at::equal(later.table, layer.table));
  EXPECT_TRUE(at::equal(later.inner->mask, layer.inner->mask));
}

TEST_F(TorchPublish, WhatLiesBetweenTheElementsCanBeLeftOut) {
  struct Slice : torch::nn::Module {
    Slice() : column(register_buffer("column", at::arange(4000, at::kFloat).view({40, 100}).select(1, 7))) {}
    at::Tensor column;
  } slice;
  PublishModuleOptions module;
  module.make_contiguous = [](const std::string& name) { return name == "column"; };

  const MappedWeights weights = Publish([&](Publisher& publisher) { return PublishModule(publisher, slice, module); });

  EXPECT_EQ(weights.Find("column")->size_bytes, 40 * 4);
  EXPECT_TRUE(at::equal(Get(weights, "column"), slice.column));
}

TEST_F(TorchPublish, AModuleThatIsLoadedIntoTheServicesMemoryIsNotCopied) {
  Layer layer(at::kMeta);
  PublishTimes times;
  times.copied_bytes = -1;
  options_.on_published = [&](const PublishTimes& published) { times = published; };

  const MappedWeights weights = Publish([&](Publisher& publisher) {
    Status status = AllocateModule(publisher, layer);
    if (!status.ok()) return status;
    EXPECT_TRUE(layer.weight.is_cpu());
    EXPECT_TRUE(layer.tied.is_alias_of(layer.weight)) << "what was tied no longer is";
    FillLayer(layer);
    return status;
  });

  EXPECT_EQ(times.copied_bytes, 0);
  ASSERT_TRUE(BindModule(layer, weights).ok());
  Layer expected;
  FillLayer(expected);
  EXPECT_TRUE(at::equal(layer.weight, expected.weight));
  EXPECT_TRUE(at::equal(layer.tied, expected.weight));
  EXPECT_TRUE(at::equal(layer.table, expected.table));
  EXPECT_TRUE(at::equal(layer.inner->mask, expected.inner->mask));
  EXPECT_EQ(weights.Find("tied")->alias_of, "weight");
}

TEST_F(TorchPublish, ATensorCanBeMadeInTheServicesMemoryWithStrides) {
  const MappedWeights weights = Publish([](Publisher& publisher) {
    TensorToPublish described;
    described.name = "columns";
    described.dtype = DataType::kF32;
    described.shape = {2, 3};
    described.strides = {1, 2};
    auto tensor = AllocateTensor(publisher, described);
    if (!tensor.ok()) return tensor.status();
    tensor->copy_(at::arange(6).view({2, 3}));
    return Status();
  });

  EXPECT_THAT(Get(weights, "columns").strides(), ElementsAre(1, 2));
  EXPECT_TRUE(at::equal(Get(weights, "columns"), at::arange(6, at::kFloat).view({2, 3})));
}

TEST_F(TorchPublish, WhatHasNoMemoryOrNoTypeOfOursIsRefusedByName) {
  const auto refuses = [this](const at::Tensor& tensor, const std::string& reason, const std::string& text) {
    const Status status = FailureOf({"bad", tensor, TensorKind::kParameter, {}});
    EXPECT_EQ(status.reason(), reason) << status.ToString();
    EXPECT_THAT(status.message(), HasSubstr("\"bad\""));
    EXPECT_THAT(status.message(), HasSubstr(text));
  };
  refuses(at::empty({2}, at::kMeta), "MANIFEST_INVALID", "meta");
  refuses(at::Tensor(), "MANIFEST_INVALID", "undefined");
  refuses(at::eye(2).to_sparse(), "MANIFEST_INVALID", "sparse");
  refuses(at::zeros({2}, at::kComplexFloat), "DTYPE_UNSUPPORTED", "ComplexFloat");
  refuses(at::zeros({2}).to(at::kFloat8_e5m2), "DTYPE_UNSUPPORTED", "Float8_e5m2");
}

}  // namespace
}  // namespace weightbroker
