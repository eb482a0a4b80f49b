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
#include <vector>

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

class TorchPublishOnGpu : public TorchOnGpu, public ::testing::WithParamInterface<HandleKind> {
 protected:
  Result<MappedWeights> AttachOrPublish(const Client::Loader& load) {
    ClientOptions client_options;
    client_options.mode = Mode::kClient;
    client_options.torch_version = "any";
    client_options.socket_path = service_->socket();
    WeightSpec spec;
    spec.model = service_->model();
    spec.layout = "engine";
    spec.engine = "torch_test";
    spec.engine_version = "1";
    PublishOptions options;
    options.attach.cuda_device = 0;
    options.attach.handle_kinds = {GetParam()};
    options.on_published = [this](const PublishTimes& times) { times_ = times; };
    auto weights = Client::Create(client_options)->AttachOrPublish(spec, load, options);
    EXPECT_TRUE(weights.ok()) << weights.status().ToString();
    EXPECT_TRUE(weights->Verify().ok());
    return weights;
  }

  PublishTimes times_;
};

INSTANTIATE_TEST_SUITE_P(Gpu, TorchPublishOnGpu, ::testing::Values(HandleKind::kCudaVmmFd, HandleKind::kCudaIpc),
                         [](const auto& kind) { return kind.param == HandleKind::kCudaIpc ? "CudaIpc" : "CudaVmm"; });

TEST_P(TorchPublishOnGpu, TensorsOfEveryLayoutComeBackExactlyFromHostAndGpu) {
  const at::Tensor matrix = Random(48);
  const at::Tensor base = at::arange(24, at::TensorOptions(at::kCUDA).dtype(at::kFloat)).view({4, 6});
  const std::vector<NamedTensor> published = {
      {"matrix", matrix, TensorKind::kParameter, {{"scale_format", "ue8m0"}}},
      {"transposed", matrix.t(), TensorKind::kParameter, {}},
      {"rows_of_it", matrix.slice(0, 3, 9), TensorKind::kParameter, {}},
      {"every_other_column", base.clone().slice(1, 0, 6, 2), TensorKind::kParameter, {}},
      {"on_the_host", at::rand({5, 7}), TensorKind::kParameter, {}},
      {"transposed_on_the_host", at::rand({5, 7}).t(), TensorKind::kParameter, {}},
      {"scalar", at::scalar_tensor(2.5, at::kCUDA), TensorKind::kBuffer, {}},
      {"nothing", at::empty({3, 0, 2}, at::kCUDA), TensorKind::kBuffer, {}},
      {"float8", base.to(at::kFloat8_e4m3fn), TensorKind::kBuffer, {}},
      {"mask", base > 7, TensorKind::kNonPersistentBuffer, {}}};

  const auto weights = AttachOrPublish([&](Publisher& publisher) { return PublishTensors(publisher, published); });

  ASSERT_TRUE(weights.ok());
  for (const NamedTensor& one : published) {
    SCOPED_TRACE(one.name);
    const auto found = ToTorch(*weights, one.name);
    ASSERT_TRUE(found.ok()) << found.status().ToString();
    EXPECT_TRUE(found->is_cuda());
    EXPECT_EQ(found->scalar_type(), one.tensor.scalar_type());
    EXPECT_EQ(found->sizes(), one.tensor.sizes());
    EXPECT_TRUE(one.tensor.numel() == 0 || found->strides() == one.tensor.strides()) << found->strides();
    EXPECT_TRUE(at::equal(found->to(at::kFloat).cpu(), one.tensor.to(at::kFloat).cpu()));
    EXPECT_EQ(weights->Find(one.name)->kind, one.kind);
  }
  EXPECT_EQ(weights->Find("matrix")->metadata.size(), 1U);
  EXPECT_EQ(weights->Find("transposed")->alias_of, "matrix");
  EXPECT_EQ(weights->Find("rows_of_it")->alias_of, "matrix");
}

// What an engine has queued in a stream of its own, and frees at once, is published all the same.
TEST_P(TorchPublishOnGpu, CopiesComeAfterWhatIsQueuedInTorchsCurrentStream) {
  const auto weights = AttachOrPublish([&](Publisher& publisher) {
    const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
    const c10::cuda::CUDAStream before = c10::cuda::getCurrentCUDAStream();
    c10::cuda::setCurrentCUDAStream(stream);
    Status status;
    for (int i = 0; i < 16 && status.ok(); ++i) {
      const at::Tensor made = at::full({1024, 1024}, static_cast<double>(i), at::TensorOptions(at::kCUDA)) * 2 + 1;
      status = PublishTensors(publisher, {{"w" + std::to_string(i), made, TensorKind::kParameter, {}}});
    }
    c10::cuda::setCurrentCUDAStream(before);
    return status;
  });

  ASSERT_TRUE(weights.ok());
  for (int i = 0; i < 16; ++i) {
    const auto found = ToTorch(*weights, "w" + std::to_string(i));
    EXPECT_TRUE(found->eq(2 * i + 1).all().item<bool>()) << i;
  }
}

TEST_P(TorchPublishOnGpu, AModuleThatIsLoadedIntoTheServicesMemoryIsNotCopied) {
  Layer layer;
  const at::Tensor values = Random(kWidth);
  times_.copied_bytes = -1;

  const auto weights = AttachOrPublish([&](Publisher& publisher) {
    Status status = AllocateModule(publisher, layer);
    if (!status.ok()) return status;
    EXPECT_TRUE(layer.weight.is_cuda());
    const c10::InferenceMode inference;
    at::mul_out(layer.weight, values, at::ones_like(values));  // computed in place, as a loader would
    return status;
  });

  ASSERT_TRUE(weights.ok());
  EXPECT_EQ(times_.copied_bytes, 0);
  ASSERT_TRUE(BindModule(layer, *weights).ok());
  EXPECT_TRUE(at::equal(layer.weight, values));
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
