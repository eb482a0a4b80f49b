#include "common/quant/declarations.h"

#include <algorithm>
#include <cctype>
#include <set>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "common/base/quote.h"
#include "common/base/strings.h"

namespace weightbroker {
namespace {

using Json = nlohmann::json;

// Keys, in lower case, whose value declares a quantization at whatever level they stand.
const std::set<std::string, std::less<>> kDeclarationKeys = {
    "quantization_config", "compression_config", "quantization", "quant_config", "quantize_config",
};

// Parts of a key, in lower case, that only quantization brings into a config.
constexpr std::string_view kMarkWords[] = {
    "quant", "marlin", "gptq", "awq",  "bnb_", "load_in_4bit", "load_in_8bit", "int4", "int8",
    "nf4",   "fp4",    "fp8",  "mxfp", "e4m3", "e5m2",         "w4a",          "w8a",  "sparsity_config",
};

// Whole keys that would be too common as parts.
const std::set<std::string, std::less<>> kMarkKeys = {
    "bits",       "nbits",   "wbits",        "w_bit",      "w_bits",    "num_bits",   "weight_bits",
    "input_bits", "a_bit",   "q_group_size", "group_bits", "scale_fmt", "zero_point", "weight_block_size",
    "desc_act",   "qscheme", "compression",
};

// Parts of keys that speak of a codec's vector quantizers, or of noise while training, not of how weights are stored.
// They excuse a number or a boolean, nothing else.
constexpr std::string_view kExcuses[] = {"quantizer", "vector_quant", "quantile", "quant_noise"};

// Maps whose keys are free text.
const std::set<std::string, std::less<>> kFreeTextKeys = {"label2id", "id2label"};

// The words for data types that say nothing of quantization, in lower case, without "torch.".
const std::set<std::string, std::less<>> kPlainDtypes = {
    "auto", "float64", "fp64", "double", "float32", "fp32", "float", "float16", "fp16", "half", "bfloat16", "bf16",
};
const std::set<std::string, std::less<>> kE4m3Dtypes = {"fp8",      "float8",        "e4m3",
                                                        "fp8_e4m3", "float8_e4m3fn", "float8_e4m3"};

// Keys of a declaration that point to a method where quant_method does not name it. The first that has a value counts.
struct MethodHint {
  const char* key;
  const char* method;
};
constexpr MethodHint kMethodHints[] = {
    {"quant_algo", "modelopt"},
    {"kv_cache_quant_algo", "modelopt"},
    {"config_groups", "compressed-tensors"},
    {"is_marlin_format", "marlin"},
    {"load_in_4bit", "bitsandbytes"},
    {"load_in_8bit", "bitsandbytes"},
    {"checkpoint_format", "gptq"},
    {"desc_act", "gptq"},
    {"zero_point", "awq"},
    {"w_bit", "awq"},
    {"quant_type", "torchao"},
    {"nbits", "hqq"},
    {"global_quant_config", "quark"},
    {"bits", "gptq, awq or mlx"},
    {"weight_block_size", "fp8"},
};

bool Contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

bool SaysNothing(const Json& value) {
  if (value.is_null()) return true;
  if (value.is_boolean()) return !value.get<bool>();
  if (value.is_number()) return value.get<double>() == 0;
  if (value.is_string()) return value.get_ref<const std::string&>().empty();
  return value.empty();
}

std::string ValueText(const Json& value) {
  if (value.is_string()) return Printable(value.get_ref<const std::string&>());
  if (value.is_object()) return "an object";
  if (value.is_array()) return "a list";
  return value.dump();
}

bool IsMarkKey(const std::string& key, const Json& value) {
  const bool is_plain_value = value.is_number() || value.is_boolean();
  const auto in_key = [&](std::string_view word) { return Contains(key, word); };
  if (is_plain_value && std::any_of(std::begin(kExcuses), std::end(kExcuses), in_key)) return false;
  return kMarkKeys.count(key) != 0 || std::any_of(std::begin(kMarkWords), std::end(kMarkWords), in_key);
}

class Search {
 public:
  explicit Search(QuantizationTraces& traces) : traces_(traces) {}

  // `where` names the object that `value` is. The depth is that of the parsed JSON, which is bounded.
  void InObject(const std::string& where, const Json& value) {
    for (const auto& [key, child] : value.items()) {
      if (kFreeTextKeys.count(key) == 0) Visit(LowerCase(key), Join(where, Printable(key)), child);
    }
  }

 private:
  static std::string Join(const std::string& where, const std::string& key) {
    return absl::StrCat(where, where.back() == ' ' ? "" : ".", key);
  }

  void Visit(const std::string& key, const std::string& where, const Json& value) {
    if (kDeclarationKeys.count(key) != 0) {
      if (!value.is_null()) traces_.declarations.push_back({where, &value});
      return;
    }
    if (Contains(key, "dtype")) {
      InDtype(where, value, /*is_of_weights=*/!Contains(key, "cache"));
    } else if (IsMarkKey(key, value) && !SaysNothing(value)) {
      traces_.marks.push_back({where, ValueText(value), false});
      return;
    }
    InAnything(where, value);
  }

  void InAnything(const std::string& where, const Json& value) {
    if (value.is_object()) InObject(where, value);
    if (!value.is_array()) return;
    for (size_t i = 0; i < value.size(); ++i) InAnything(absl::StrCat(where, "[", i, "]"), value[i]);
  }

  // A data type, or a list or an object of them, one for each part of the model, at whatever depth.
  void InDtype(const std::string& where, const Json& value, bool is_of_weights) {
    if (value.is_object()) {
      for (const auto& [key, child] : value.items()) InDtype(Join(where, Printable(key)), child, is_of_weights);
      return;
    }
    if (value.is_array()) {
      for (size_t i = 0; i < value.size(); ++i) InDtype(absl::StrCat(where, "[", i, "]"), value[i], is_of_weights);
      return;
    }
    if (SaysNothing(value)) return;
    std::string word = value.is_string() ? LowerCase(value.get<std::string>()) : value.dump();
    if (word.rfind("torch.", 0) == 0) word = word.substr(6);
    if (kPlainDtypes.count(word) != 0) return;
    traces_.marks.push_back({where, ValueText(value), is_of_weights && kE4m3Dtypes.count(word) != 0});
  }

  QuantizationTraces& traces_;
};

std::string StringAt(const Json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_string() ? it->get<std::string>() : std::string();
}

// ModelOpt's side file has the declaration one level down.
const Json& Inner(const Json& declaration) {
  const auto it = declaration.find("quantization");
  return it != declaration.end() && it->is_object() ? *it : declaration;
}

}  // namespace

std::string LowerCase(std::string text) {
  for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return text;
}

QuantizationTraces FindQuantizationTraces(const Json& config, const std::map<std::string, Json>& side_files) {
  QuantizationTraces traces;
  if (config.is_object()) Search(traces).InObject("config.json: ", config);
  for (const auto& [name, contents] : side_files) traces.declarations.push_back({name, &contents});
  return traces;
}

std::string NameMethod(const Json& declaration) {
  if (!declaration.is_object()) return "malformed";
  const Json& inner = Inner(declaration);
  const std::string method = LowerCase(StringAt(inner, "quant_method"));
  const std::string algorithm = StringAt(inner, "quant_algo");
  if (!method.empty()) return Printable(algorithm.empty() ? method : absl::StrCat(method, " (", algorithm, ")"));
  if (!algorithm.empty()) return Printable(absl::StrCat("modelopt (", algorithm, ")"));
  for (const MethodHint& hint : kMethodHints) {
    const auto it = inner.find(hint.key);
    if (it != inner.end() && !SaysNothing(*it)) return absl::StrCat("unnamed (", hint.key, ": ", hint.method, ")");
  }
  return "unnamed";
}

}  // namespace weightbroker
