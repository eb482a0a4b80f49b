// Torch over weights in GPU memory. The service is started by another file: its headers and torch's do not go together.

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>

#include "tests/gpu/torch_service.h"
#include "weightbroker/client.h"
#include "weightbroker/torch.h"

namespace weightbroker::testing {
namespace {

constexpr int64_t kWidth = 1024;

struct Layer : torch::nn::Module {
  explicit Layer(at::Device device = at::kMeta)
      : weight(register_parameter("weight",
                                  at::empty({kWidth, kWidth}, at::TensorOptions(device).dtype(at::kBFloat16)))) {}
  at::Tensor forward(const at::Tensor& input) const { return at::linear(input, weight); }

  at::Tensor weight;
};

class TorchOnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    lack_ = LackOfGpusForTorch();
    if (!lack_.empty() && GpusAreRequired()) FAIL() << lack_;
    if (!lack_.empty()) GTEST_SKIP() << lack_;
    service_ = std::make_unique<TorchService>("layer.weight", kWidth);
  }

  MappedWeights Attach() const {
    ClientOptions options;
    options.mode = Mode::kClient;
    options.torch_version = "any";
    options.socket_path = service_->socket();
    WeightSpec spec;
    spec.model = service_->model();
    AttachOptions attach;
    attach.fallback = Fallback::kFail;
    attach.register_if_missing = true;
    attach.cuda_device = 0;
    auto weights = Client::Create(options)->Attach(spec, attach);
    EXPECT_TRUE(weights.ok()) << weights.status().ToString();
    return *std::move(weights);
  }

  static at::Tensor Random(int64_t rows) {
    return at::randn({rows, kWidth}, at::TensorOptions(at::kCUDA).dtype(at::kFloat)).to(at::kBFloat16);
  }

  std::string lack_;
  std::unique_ptr<TorchService> service_;
};

BindOptions LayerNames() {
  BindOptions options;
  options.prefix = "layer.";
  return options;
}

TEST_F(TorchOnGpu, BindsAModuleWithoutAByteOfStorage) {
  const at::Tensor context = at::zeros({1}, at::kCUDA);
  const MappedWeights weights = Attach();
  const auto allocated = [] {
    return c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes.at(0).allocated;
  };
  const auto before = allocated();

  Layer layer;
  const Status status = BindModule(layer, weights, LayerNames());

  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(allocated(), before);
  EXPECT_TRUE(layer.weight.is_cuda());
  EXPECT_EQ(layer.weight.const_data_ptr(), weights.Find("layer.weight")->data);
}

TEST_F(TorchOnGpu, ComputesBitForBitWhatItComputesOnACopy) {
  const MappedWeights weights = Attach();
  Layer mapped;
  ASSERT_TRUE(BindModule(mapped, weights, LayerNames()).ok());
  const c10::InferenceMode inference;
  const at::Tensor copy = mapped.weight.clone();
  const at::Tensor input = Random(64);

  EXPECT_TRUE(at::equal(mapped.forward(input), at::linear(input, copy)));
}

TEST_F(TorchOnGpu, ReplaysACapturedGraphOverMappedWeights) {
  const MappedWeights weights = Attach();
  Layer layer;
  ASSERT_TRUE(BindModule(layer, weights, LayerNames()).ok());
  const c10::InferenceMode inference;
  at::Tensor input = Random(32);
  at::Tensor output;
  at::cuda::CUDAGraph graph;
  {
    const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
    const c10::cuda::CUDAStream before = c10::cuda::getCurrentCUDAStream();
    c10::cuda::setCurrentCUDAStream(stream);
    layer.forward(input);  // lets cuBLAS make what it makes once
    stream.synchronize();
    graph.capture_begin();
    output = layer.forward(input);
    graph.capture_end();
    c10::cuda::setCurrentCUDAStream(before);
  }

  for (int i = 0; i < 3; ++i) {
    input.copy_(Random(32));
    c10::cuda::getCurrentCUDAStream().synchronize();
    graph.replay();
    c10::cuda::device_synchronize();
    EXPECT_TRUE(at::equal(output, layer.forward(input))) << "replay " << i;
  }
}

TEST_F(TorchOnGpu, KeepsTheMappingThoughServiceAndWeightsHaveGone) {
  Layer layer;
  {
    const MappedWeights weights = Attach();
    ASSERT_TRUE(BindModule(layer, weights, LayerNames()).ok());
  }
  const at::Tensor before = layer.weight.clone();

  service_.reset();

  EXPECT_TRUE(at::equal(layer.weight, before));
}

TEST_F(TorchOnGpu, EmbedsAsTransformersDoesAndAsOnPrivateWeights) {
  const std::string model = MinilmFolder();
  if (model.empty()) GTEST_SKIP() << "WEIGHTBROKER_MINILM names no folder with all-MiniLM-L6-v2's shape";

  const EngineRun run = service_->RunTorchEngine(model, MinilmInputs());

  EXPECT_EQ(run.code, 0) << run.text;
  EXPECT_THAT(run.text, ::testing::HasSubstr("\"equals_private\":true"));
}

}  // namespace
}  // namespace weightbroker::testing
