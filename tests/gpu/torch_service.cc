#include "tests/gpu/torch_service.h"

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/gpu/gpu_fixture.h"
#include "tests/support/checkpoint_builder.h"

namespace weightbroker::testing {
namespace {

class Access : public GpuTest {
 public:
  using GpuTest::AreRequired;
  using GpuTest::LackOfGpus;
  void TestBody() override {}
};

std::string FromEnvironment(const char* name) {
  const char* value = getenv(name);
  return value == nullptr ? "" : value;
}

// BF16 numbers between -0.25 and 0.25, different from element to element.
std::string SmallNumbers(int64_t count) {
  std::string bytes;
  bytes.reserve(static_cast<size_t>(count) * 2);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t mixed = i * 2654435761 % 127;
    bytes += static_cast<char>(mixed);
    bytes += static_cast<char>((i % 2 == 0 ? 0x3C : 0xBC) + mixed % 2);
  }
  return bytes;
}

}  // namespace

struct TorchService::State {
  Service service;
};

std::string LackOfGpusForTorch() { return Access::LackOfGpus(1); }
bool GpusAreRequired() { return Access::AreRequired(1); }
std::string MinilmFolder() { return FromEnvironment("WEIGHTBROKER_MINILM"); }
std::string MinilmInputs() { return FromEnvironment("WEIGHTBROKER_MINILM_INPUTS"); }

TorchService::TorchService(const std::string& tensor, int64_t width) : state_(std::make_unique<State>()) {
  const std::string folder = state_->service.NewModel("model");
  const std::string numbers = SmallNumbers(width * width);
  const nlohmann::json header = {
      {tensor, {{"dtype", "BF16"}, {"shape", {width, width}}, {"data_offsets", {0, numbers.size()}}}}};
  WriteFile(folder + "/config.json", kPlainConfig);
  WriteFile(folder + "/model.safetensors", RawSafetensors(header.dump()) + numbers);
}

TorchService::~TorchService() = default;

std::string TorchService::socket() const { return state_->service.socket(); }

std::string TorchService::model() const { return Service::Model("model"); }

EngineRun TorchService::RunTorchEngine(const std::string& folder, const std::string& inputs) const {
  std::filesystem::copy(folder, state_->service.NewModel("minilm"), std::filesystem::copy_options::recursive);
  const Finished engine =
      RunProgram("torch_engine", {"--socket", socket(), "--model", Service::Model("minilm"), "--model_root",
                                  "models=" + state_->service.ModelFolder(""), "--inputs", inputs, "--register",
                                  "--compare_private", "--device", "cuda:0"});
  return {engine.exit.shell_code(), engine.output + engine.errors};
}

}  // namespace weightbroker::testing
