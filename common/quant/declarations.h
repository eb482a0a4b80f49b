// Where a quantization method hides. Transformers, engines and quantization tools each have their own place and their
// own keys for it, so the whole config is searched, at every level, and files beside it too. Thread-safe: pure
// functions.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace weightbroker {

// A value that is there to declare a quantization, whatever it holds: that of "quantization_config" at any level, or a
// whole side file. It points into the config.
struct QuantizationDeclaration {
  std::string where;  // "config.json: text_config.quantization_config"
  const nlohmann::json* value = nullptr;
};

// A key outside any declaration that nobody writes into the config of an unquantized model: "is_marlin_format": true,
// "expert_dtype": "fp4".
struct QuantizationMark {
  std::string where;           // "config.json: expert_dtype"
  std::string value;           // "fp4"
  bool is_e4m3_dtype = false;  // the mark says that a data type is FP8 E4M3, which fits a block-FP8 declaration
};

struct QuantizationTraces {
  std::vector<QuantizationDeclaration> declarations;
  std::vector<QuantizationMark> marks;
};

QuantizationTraces FindQuantizationTraces(const nlohmann::json& config,
                                          const std::map<std::string, nlohmann::json>& side_files);

// What a declaration calls its method, in lower case: quant_method, with quant_algo in brackets where there is one too;
// if there is none, what other keys point to, e.g. "unnamed (is_marlin_format: marlin)". "malformed" for what is no
// object.
std::string NameMethod(const nlohmann::json& declaration);

// ASCII only.
std::string LowerCase(std::string text);

}  // namespace weightbroker
