#include "common/quant/gate.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/quant/declarations.h"
#include "common/quant/module_set.h"
#include "common/quant/tensor_check.h"

namespace weightbroker {
namespace {

using Json = nlohmann::json;

constexpr char kOnlyThese[] =
    "only unquantized weights and block-wise FP8 (quant_method fp8, weight_block_size [128, 128], dynamic activations, "
    "e4m3) "
    "can be served: the raw bytes of others are not all of their meaning";

// What block-wise FP8 may say beside its method and its block size. A key that is not here, or another value, is
// refused: it might change what the bytes mean. A null, and an empty list or object, say nothing.
struct Fp8Key {
  const char* key;
  std::vector<Json> allowed;  // strings in lower case; empty for a list of module names
};
const std::vector<Fp8Key>& Fp8Keys() {
  static const auto* const keys = new std::vector<Fp8Key>{
      {"activation_scheme", {"dynamic"}},
      {"fmt", {"e4m3", "e4m3fn", "float8_e4m3fn"}},
      {"scale_fmt", {"ue8m0"}},  // scales are rounded to powers of two, and still stored and applied as floats
      {"modules_to_not_convert", {}},
      {"ignored_layers", {}},
      {"is_checkpoint_fp8_serialized", {true}},
      {"dequantize", {false}},
      {"weight_per_tensor", {false}},
      {"act_per_tensor", {false}},
  };
  return *keys;
}

bool SaysNothing(const Json& value) { return value.is_null() || (value.is_structured() && value.empty()); }

absl::Status Refuse(Reason reason, const std::string& where, const std::string& method, const std::string& text) {
  return MakeError(reason, absl::StrCat(where, ": ", text), {{"where", where}, {"method", method}});
}

absl::Status Unsupported(const std::string& where, const std::string& method, const std::string& text) {
  return Refuse(Reason::kQuantizationUnsupported, where, method, absl::StrCat(text, "; ", kOnlyThese));
}

std::string ShortText(const Json& value) {
  return Printable(value.dump(/*indent=*/-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace));
}

absl::StatusOr<std::array<int64_t, 2>> ReadBlockSize(const std::string& where, const Json& config) {
  const auto it = config.find("weight_block_size");
  if (it == config.end() || it->is_null()) {
    return Unsupported(
        where, "fp8", "quant_method fp8 without weight_block_size is per-tensor to some engines and 128x128 to others");
  }
  const auto is_positive = [](const Json& value) {
    return value.is_number_unsigned() && value.get<uint64_t>() > 0 && value.get<uint64_t>() <= INT32_MAX;
  };
  if (!it->is_array() || it->size() != 2 || !is_positive((*it)[0]) || !is_positive((*it)[1])) {
    return Refuse(
        Reason::kQuantizationMalformed, where, "fp8",
        absl::StrCat("weight_block_size is ", ShortText(*it), "; it must be two positive integers, rows and columns"));
  }
  const std::array<int64_t, 2> size = {(*it)[0].get<int64_t>(), (*it)[1].get<int64_t>()};
  if (size != kFp8BlockSize) {
    return Unsupported(where, "fp8", absl::StrCat("weight_block_size is ", ShortText(*it), ", not [128, 128]"));
  }
  return size;
}

absl::StatusOr<std::vector<std::string>> ReadModuleNames(const std::string& where, const std::string& key,
                                                         const Json& list) {
  const auto malformed = [&](const std::string& text) {
    return Refuse(Reason::kQuantizationMalformed, where, "fp8", absl::StrCat(key, " ", text));
  };
  if (!list.is_array()) return malformed(absl::StrCat("is ", ShortText(list), "; it must be a list of module names"));
  std::vector<std::string> names;
  for (const Json& entry : list) {
    if (!entry.is_string()) return malformed(absl::StrCat("holds ", ShortText(entry), "; it must hold module names"));
    const auto& name = entry.get_ref<const std::string&>();
    if (!ModuleSet::IsPlainName(name)) {
      return malformed(absl::StrCat("holds ", Quote(name),
                                    "; it must hold plain module names, since engines read patterns "
                                    "differently"));
    }
    names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

bool IsAllowed(const Fp8Key& row, const Json& value) {
  const Json folded = value.is_string() ? Json(LowerCase(value.get<std::string>())) : value;
  return std::find(row.allowed.begin(), row.allowed.end(), folded) != row.allowed.end();
}

std::string AllowedText(const Fp8Key& row) {
  std::string text;
  for (const Json& value : row.allowed) absl::StrAppend(&text, text.empty() ? "" : " or ", value.dump());
  return text;
}

// Reads one key of a block-FP8 declaration; a list of modules goes into `ignored`.
absl::Status ReadFp8Key(const std::string& where, const std::string& key, const Json& value,
                        std::optional<std::vector<std::string>>& ignored) {
  if (key == "quant_method" || key == "weight_block_size" || SaysNothing(value)) return absl::OkStatus();
  const auto& keys = Fp8Keys();
  const auto row =
      std::find_if(keys.begin(), keys.end(), [&](const Fp8Key& candidate) { return candidate.key == key; });
  if (row == keys.end()) {
    return Unsupported(
        where, "fp8",
        absl::StrCat(Quote(key), " is ", ShortText(value), ", and what that does to the weights is not known"));
  }
  if (!row->allowed.empty()) {
    if (IsAllowed(*row, value)) return absl::OkStatus();
    return Unsupported(where, "fp8", absl::StrCat(key, " is ", ShortText(value), ", not ", AllowedText(*row)));
  }
  ASSIGN_OR_RETURN(auto names, ReadModuleNames(where, key, value));
  if (ignored.has_value() && *ignored != names) {
    return Refuse(
        Reason::kQuantizationConflict, where, "fp8",
        "modules_to_not_convert and ignored_layers name different modules, and engines differ on which counts");
  }
  ignored = std::move(names);
  return absl::OkStatus();
}

absl::StatusOr<Quantization> JudgeBlockFp8(const std::string& where, const Json& config) {
  Quantization quantization;
  quantization.method = "fp8";
  ASSIGN_OR_RETURN(quantization.block_size, ReadBlockSize(where, config));
  std::optional<std::vector<std::string>> ignored;
  for (const auto& [key, value] : config.items()) RETURN_IF_ERROR(ReadFp8Key(where, key, value, ignored));
  quantization.ignored_modules = std::move(ignored).value_or(std::vector<std::string>());
  return quantization;
}

absl::StatusOr<Quantization> Judge(const QuantizationDeclaration& declaration) {
  const std::string method = NameMethod(*declaration.value);
  if (!declaration.value->is_object()) {
    return Refuse(
        Reason::kQuantizationMalformed, declaration.where, method,
        absl::StrCat("is ", ShortText(*declaration.value), "; it must be an object that names a quant_method"));
  }
  if (method == "fp8" && declaration.value->contains("quant_method")) {
    return JudgeBlockFp8(declaration.where, *declaration.value);
  }
  return Unsupported(declaration.where, method, absl::StrCat("the quantization method is ", Quote(method)));
}

absl::Status Conflict(const QuantizationDeclaration& a, const QuantizationDeclaration& b) {
  const std::string first = NameMethod(*a.value);
  const std::string second = NameMethod(*b.value);
  return MakeError(Reason::kQuantizationConflict,
                   absl::StrCat(a.where, " (", first, ") and ", b.where, " (", second,
                                ") say different things of the quantization: it is not known which counts"),
                   {{"where", a.where}, {"method", first}, {"other_where", b.where}, {"other_method", second}});
}

bool SaySame(const Quantization& a, const Quantization& b) {
  return a.method == b.method && a.block_size == b.block_size && a.ignored_modules == b.ignored_modules;
}

absl::StatusOr<Quantization> JudgeDeclarations(const std::vector<QuantizationDeclaration>& declarations) {
  if (declarations.empty()) return Quantization();
  const QuantizationDeclaration& first = declarations.front();
  for (const QuantizationDeclaration& other : declarations) {
    if (NameMethod(*other.value) != NameMethod(*first.value)) return Conflict(first, other);
  }
  ASSIGN_OR_RETURN(Quantization quantization, Judge(first));
  for (const QuantizationDeclaration& other : declarations) {
    ASSIGN_OR_RETURN(const Quantization judged, Judge(other));
    if (!SaySame(judged, quantization)) return Conflict(first, other);
  }
  return quantization;
}

}  // namespace

absl::StatusOr<Quantization> ReadQuantizationConfig(const Json& config, const std::map<std::string, Json>& side_files) {
  const QuantizationTraces traces = FindQuantizationTraces(config, side_files);
  ASSIGN_OR_RETURN(Quantization quantization, JudgeDeclarations(traces.declarations));
  for (const QuantizationMark& mark : traces.marks) {
    if (mark.is_e4m3_dtype && quantization.method == "fp8") continue;
    return Unsupported(mark.where, mark.value,
                       absl::StrCat("the value ", Quote(mark.value), " speaks of a quantization that ",
                                    traces.declarations.empty() ? "no quantization_config declares"
                                                                : "its quantization_config does not"));
  }
  return quantization;
}

absl::StatusOr<Quantization> CheckQuantization(const Checkpoint& checkpoint) {
  ASSIGN_OR_RETURN(Quantization quantization, ReadQuantizationConfig(checkpoint.config, checkpoint.side_files));
  RETURN_IF_ERROR(CheckTensors(checkpoint, quantization));
  return quantization;
}

}  // namespace weightbroker
