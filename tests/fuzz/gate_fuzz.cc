// The input is config.json, then, each after a NUL byte, a side file (may be empty) and bytes that choose tensors, four
// for each: name, type, rows, columns.
#include <algorithm>
#include <string_view>

#include "common/base/json.h"
#include "common/quant/gate.h"
#include "tests/fuzz/check.h"

namespace weightbroker {
namespace {

constexpr const char* kNames[] = {"model.layers.0.mlp.gate.weight",
                                  "model.layers.0.mlp.gate_up_proj.weight",
                                  "lm_head.weight",
                                  "model.layers.1.mlp.gate_up_proj.weight",
                                  "model.embed_tokens.weight",
                                  "w",
                                  "a.qweight",
                                  ""};
constexpr const char* kTypes[] = {"F8_E4M3", "BF16", "F32", "F16", "U8", "F8_E8M0", "I32", "F4"};

std::string_view TakeUntilNul(std::string_view& input) {
  const size_t nul = std::min(input.find('\0'), input.size());
  const std::string_view part = input.substr(0, nul);
  input.remove_prefix(std::min(nul + 1, input.size()));
  return part;
}

std::vector<CheckpointTensor> MakeTensors(std::string_view bytes) {
  std::map<std::string, CheckpointTensor> by_name;
  for (; bytes.size() >= 4; bytes.remove_prefix(4)) {
    CheckpointTensor tensor;
    const auto byte = [&](size_t i) { return static_cast<unsigned char>(bytes[i]); };
    tensor.name = std::string(kNames[byte(0) % 8]) + (byte(0) >= 128 ? "_scale_inv" : "");
    tensor.dtype = FindDtype(kTypes[byte(1) % 8]);
    if (byte(1) < 192) tensor.shape.push_back(byte(2) * 3);
    if (byte(1) < 224) tensor.shape.push_back(byte(3) * 3);
    by_name.emplace(tensor.name, tensor);
  }
  std::vector<CheckpointTensor> tensors;
  for (auto& [name, tensor] : by_name) tensors.push_back(std::move(tensor));
  return tensors;
}

bool HasFp8(const Checkpoint& checkpoint) {
  return std::any_of(checkpoint.tensors.begin(), checkpoint.tensors.end(),
                     [](const CheckpointTensor& tensor) { return tensor.dtype->proto == v1::DATA_TYPE_F8_E4M3; });
}

void CheckAccepted(const Checkpoint& checkpoint, const Quantization& quantization) {
  const auto declared = checkpoint.config.find("quantization_config");
  const bool declares = declared != checkpoint.config.end() && !declared->is_null();
  if (quantization.method == "none") {
    FUZZ_CHECK(!declares && checkpoint.side_files.empty());
    FUZZ_CHECK(!HasFp8(checkpoint));
  } else {
    FUZZ_CHECK(quantization.method == "fp8");
    FUZZ_CHECK(quantization.block_size == kFp8BlockSize);
    FUZZ_CHECK(HasFp8(checkpoint));
  }
}

void Run(std::string_view input) {
  Checkpoint checkpoint;
  checkpoint.files.shard_names = {"model.safetensors"};
  auto config = ParseStrictJson(TakeUntilNul(input));
  if (!config.ok() || !config->is_object()) return;
  checkpoint.config = *std::move(config);
  if (const std::string_view text = TakeUntilNul(input); !text.empty()) {
    auto side_file = ParseStrictJson(text);
    if (!side_file.ok()) return;
    checkpoint.side_files["hf_quant_config.json"] = *std::move(side_file);
  }
  checkpoint.tensors = MakeTensors(input);
  if (checkpoint.tensors.empty()) checkpoint.tensors = MakeTensors(std::string_view("\x05\x01\x01\x01", 4));
  const auto quantization = CheckQuantization(checkpoint);
  if (quantization.ok()) {
    CheckAccepted(checkpoint, *quantization);
  } else {
    CheckRefusal(quantization.status());
  }
}

}  // namespace
}  // namespace weightbroker

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  weightbroker::Run(std::string_view(reinterpret_cast<const char*>(data), size));
  return 0;
}
