// The input is config.json, then, each after a NUL byte, side files (any of them may be empty; a byte 0x1E stands
// between them, in the order of kQuantizationSideFiles) and bytes that choose tensors, four for each: name, type, rows,
// columns.
#include <algorithm>
#include <cctype>
#include <set>
#include <string_view>

#include "common/base/json.h"
#include "common/quant/gate.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/target.h"

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

std::string Lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

// Maps of labels: their keys are words of people.
bool IsOfLabels(const std::string& key) { return key == "label2id" || key == "id2label"; }

// Whether a value somewhere declares a quantization, or a data type that is no plain float: a second opinion, which
// looks at every pair of key and value of the config.
bool SaysQuantized(const std::string& key, const nlohmann::json& value, bool in_dtype) {
  static const std::set<std::string> kDeclarations = {"quantization_config", "compression_config", "quantization",
                                                      "quant_config", "quantize_config"};
  static const std::set<std::string> kPlain = {"",      "auto",    "float64", "fp64", "double",   "float32", "fp32",
                                               "float", "float16", "fp16",    "half", "bfloat16", "bf16"};
  const std::string word = Lower(key);
  if (kDeclarations.count(word) != 0) return !value.is_null();
  in_dtype = in_dtype || word.find("dtype") != std::string::npos;
  if (value.is_object()) {
    return std::any_of(value.items().begin(), value.items().end(), [&](const auto& item) {
      return !IsOfLabels(item.key()) && SaysQuantized(item.key(), item.value(), in_dtype);
    });
  }
  if (value.is_array()) {
    return std::any_of(value.begin(), value.end(),
                       [&](const nlohmann::json& element) { return SaysQuantized("", element, in_dtype); });
  }
  if (!in_dtype || !value.is_string()) return false;
  const std::string dtype = Lower(value.get<std::string>());
  return kPlain.count(dtype.rfind("torch.", 0) == 0 ? dtype.substr(6) : dtype) == 0;
}

int64_t Blocks(int64_t size) { return (size + 127) / 128; }

// Every FP8 weight has a scale for each of its blocks, and every scale has its weight.
void CheckScales(const Checkpoint& checkpoint) {
  std::map<std::string, const CheckpointTensor*> by_name;
  for (const CheckpointTensor& tensor : checkpoint.tensors) by_name[tensor.name] = &tensor;
  for (const auto& [name, tensor] : by_name) {
    if (tensor->dtype->proto == v1::DATA_TYPE_F8_E4M3) {
      const auto scale = by_name.find(name + "_scale_inv");
      FUZZ_CHECK(scale != by_name.end() && tensor->shape.size() == 2);
      FUZZ_CHECK(scale->second->dtype->name == "F32" || scale->second->dtype->name == "F16" ||
                 scale->second->dtype->name == "BF16");
      int64_t scales = 1;
      for (const int64_t dimension : scale->second->shape) scales *= dimension;
      FUZZ_CHECK(scales == Blocks(tensor->shape[0]) * Blocks(tensor->shape[1]));
    }
    if (name.size() >= 10 && name.compare(name.size() - 10, 10, "_scale_inv") == 0) {
      const auto weight = by_name.find(name.substr(0, name.size() - 10));
      FUZZ_CHECK(weight != by_name.end() && weight->second->dtype->proto == v1::DATA_TYPE_F8_E4M3);
    }
  }
}

void CheckAccepted(const Checkpoint& checkpoint, const Quantization& quantization) {
  for (const CheckpointTensor& tensor : checkpoint.tensors) {
    FUZZ_CHECK(tensor.dtype->proto != v1::DATA_TYPE_UNSPECIFIED);
  }
  CheckScales(checkpoint);
  if (quantization.method == "none") {
    FUZZ_CHECK(checkpoint.side_files.empty());
    FUZZ_CHECK(!SaysQuantized("", checkpoint.config, false));
    FUZZ_CHECK(!HasFp8(checkpoint));
  } else {
    FUZZ_CHECK(quantization.method == "fp8");
    FUZZ_CHECK(quantization.block_size == kFp8BlockSize);
    FUZZ_CHECK(HasFp8(checkpoint));
  }
}

bool IsTakenForUnquantized(const nlohmann::json& config, const std::map<std::string, nlohmann::json>& side_files) {
  const auto quantization = ReadQuantizationConfig(config, side_files);
  return quantization.ok() && quantization->method == "none";
}

// What is not taken for unquantized is not so either further down, in a list, or in a file of its own.
void HideElsewhere(const nlohmann::json& config) {
  if (IsTakenForUnquantized(config, {})) return;
  FUZZ_CHECK(!IsTakenForUnquantized({{"thinker_config", {{"text_config", config}}}}, {}));
  FUZZ_CHECK(!IsTakenForUnquantized({{"parts", nlohmann::json::array({nlohmann::json::array({config})})}}, {}));
  for (const char* const name : kQuantizationSideFiles) {
    FUZZ_CHECK(!IsTakenForUnquantized(nlohmann::json::object(), {{name, config}}));
  }
}

// False if one is no JSON.
bool AddSideFiles(std::string_view texts, Checkpoint& checkpoint) {
  for (const char* const name : kQuantizationSideFiles) {
    const size_t end = std::min(texts.find('\x1E'), texts.size());
    const std::string_view text = texts.substr(0, end);
    texts.remove_prefix(std::min(end + 1, texts.size()));
    if (text.empty()) continue;
    auto contents = ParseStrictJson(text);
    if (!contents.ok()) return false;
    checkpoint.side_files[name] = *std::move(contents);
  }
  return true;
}

void Judge(std::string_view input) {
  Checkpoint checkpoint;
  checkpoint.files.shard_names = {"model.safetensors"};
  auto config = ParseStrictJson(TakeText(input));
  if (!config.ok() || !config->is_object()) return;
  checkpoint.config = *std::move(config);
  if (!AddSideFiles(TakeText(input), checkpoint)) return;
  checkpoint.tensors = MakeTensors(input);
  if (checkpoint.tensors.empty()) checkpoint.tensors = MakeTensors(std::string_view("\x05\x01\x01\x01", 4));
  const auto quantization = CheckQuantization(checkpoint);
  if (quantization.ok()) {
    CheckAccepted(checkpoint, *quantization);
  } else {
    CheckRefusal(quantization.status());
  }
  HideElsewhere(checkpoint.config);
}

}  // namespace
}  // namespace weightbroker

FUZZ_TARGET(gate) { weightbroker::Judge(input); }
