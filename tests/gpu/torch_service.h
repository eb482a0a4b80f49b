// A service for tests of torch, behind a header that brings in neither protobuf nor gRPC.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace weightbroker::testing {

// Empty if there is a GPU; else why not. And whether there must be one (WEIGHTBROKER_REQUIRE_GPUS).
std::string LackOfGpusForTorch();
bool GpusAreRequired();

// Where run.sh put a model of all-MiniLM-L6-v2's shape (WEIGHTBROKER_MINILM), and the sentences with their embeddings
// (WEIGHTBROKER_MINILM_INPUTS); empty if nowhere.
std::string MinilmFolder();
std::string MinilmInputs();

struct EngineRun {
  int code = -1;
  std::string text;  // what it printed
};

class TorchService {
 public:
  // With a model of one BF16 tensor, `width` x `width`, whose values are small numbers.
  TorchService(const std::string& tensor, int64_t width);
  ~TorchService();
  TorchService(const TorchService&) = delete;
  TorchService& operator=(const TorchService&) = delete;

  std::string socket() const;
  std::string model() const;

  // Runs torch_engine on the GPU with the model in that folder, and on private weights beside it.
  EngineRun RunTorchEngine(const std::string& folder, const std::string& inputs) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace weightbroker::testing
