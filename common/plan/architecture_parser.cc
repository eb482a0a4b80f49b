#include "common/plan/architecture_parser.h"

#include <algorithm>
#include <functional>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/error.h"
#include "common/base/json.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/plan/expression.h"

namespace weightbroker {
namespace {

using Json = nlohmann::json;

constexpr int kMaxAlternatives = 64;

// "a.{b,c}.d" -> "a.b.d", "a.c.d". Placeholders have no comma, and stay. Empty if braces do not fit.
std::vector<std::string> ExpandBraces(const std::string& pattern) {
  for (size_t open = pattern.find('{'); open != std::string::npos; open = pattern.find('{', open + 1)) {
    const size_t close = pattern.find('}', open);
    if (close == std::string::npos) return {};
    const std::string inner = pattern.substr(open + 1, close - open - 1);
    if (inner.find(',') == std::string::npos) continue;
    std::vector<std::string> expanded;
    for (size_t begin = 0; begin <= inner.size();) {
      const size_t comma = std::min(inner.find(',', begin), inner.size());
      const auto rest = ExpandBraces(
          absl::StrCat(pattern.substr(0, open), inner.substr(begin, comma - begin), pattern.substr(close + 1)));
      if (rest.empty()) return {};
      expanded.insert(expanded.end(), rest.begin(), rest.end());
      if (expanded.size() > kMaxAlternatives) return {};
      begin = comma + 1;
    }
    return expanded;
  }
  return {pattern};
}

class Parser {
 public:
  explicit Parser(const std::string& label) { result_.label = label; }

  absl::StatusOr<Architecture> Parse(const std::string& text) {
    const auto json = ParseStrictJson(text);
    if (!json.ok()) return Invalid("", std::string(json.status().message()));
    RETURN_IF_ERROR(CheckKeys("", *json,
                              {"architectures", "config", "prefixes", "numbers", "refuse", "max_tensor_parallel_size",
                               "tensors", "fused", "comment"}));
    RETURN_IF_ERROR(ReadNames(*json));
    RETURN_IF_ERROR(ReadPrefixes(*json));
    RETURN_IF_ERROR(ReadNumbers(*json));
    RETURN_IF_ERROR(ReadRefused(*json));
    RETURN_IF_ERROR(ReadTensors(*json));
    RETURN_IF_ERROR(ReadFused(*json));
    return std::move(result_);
  }

 private:
  absl::Status Invalid(const std::string& where, const std::string& text) const {
    return MakeError(Reason::kArchitectureInvalid,
                     absl::StrCat(Printable(result_.label), ": ", where.empty() ? "" : Printable(where),
                                  where.empty() ? "" : ": ", text, "; docs/architectures.md has the format"),
                     {{"file", Printable(result_.label)}, {"key", Printable(where)}});
  }

  absl::Status CheckKeys(const std::string& where, const Json& object, const std::set<std::string>& allowed) const {
    if (!object.is_object()) return Invalid(where, "is no object");
    for (const auto& [key, value] : object.items()) {
      if (allowed.count(key) != 0) continue;
      return Invalid(where,
                     absl::StrCat("has the key ", Quote(key), "; these are known: ", absl::StrJoin(allowed, ", ")));
    }
    return absl::OkStatus();
  }

  // A string, or a list of them with at least one.
  absl::StatusOr<std::vector<std::string>> ReadStrings(const std::string& where, const Json& value) const {
    std::vector<std::string> strings;
    if (value.is_string()) return std::vector<std::string>{value.get<std::string>()};
    for (const Json& entry : value.is_array() ? value : Json::array()) {
      if (!entry.is_string()) return Invalid(where, "is to be a list of strings");
      strings.push_back(entry.get<std::string>());
    }
    if (strings.empty()) return Invalid(where, "is to be a string or a list of strings");
    return strings;
  }

  absl::Status ReadNames(const Json& json) {
    if (!json.contains("architectures")) return Invalid("architectures", "is missing");
    ASSIGN_OR_RETURN(result_.names, ReadStrings("architectures", json["architectures"]));
    result_.sections = {""};
    if (json.contains("config")) {
      ASSIGN_OR_RETURN(result_.sections, ReadStrings("config", json["config"]));
    }
    if (!json.contains("max_tensor_parallel_size")) return absl::OkStatus();
    const Json& limit = json["max_tensor_parallel_size"];
    if (!limit.is_number_unsigned() || limit < 1 || limit > 1 << 20) {
      return Invalid("max_tensor_parallel_size", "is no positive integer");
    }
    result_.max_tensor_parallel_size = limit.get<int64_t>();
    return absl::OkStatus();
  }

  absl::Status ReadPrefixes(const Json& json) {
    if (!json.contains("prefixes")) return absl::OkStatus();
    if (!json["prefixes"].is_object()) return Invalid("prefixes", "is no object");
    for (const auto& [prefix, canonical] : json["prefixes"].items()) {
      if (prefix.empty() || !canonical.is_string()) return Invalid("prefixes", "is to map a prefix to a string");
      result_.prefixes[prefix] = canonical.get<std::string>();
    }
    return absl::OkStatus();
  }

  absl::Status CheckExpression(const std::string& where, const std::string& expression) const {
    if (ConfigNumbers::IsWellFormed(expression)) return absl::OkStatus();
    return Invalid(where, absl::StrCat(Quote(expression), " is no expression of names, integers, +, * and /"));
  }

  absl::Status ReadNumbers(const Json& json) {
    if (!json.contains("numbers")) return absl::OkStatus();
    if (!json["numbers"].is_object()) return Invalid("numbers", "is no object");
    for (const auto& [name, value] : json["numbers"].items()) {
      const std::string where = absl::StrCat("numbers: ", name);
      ASSIGN_OR_RETURN(auto alternatives, ReadStrings(where, value));
      for (const std::string& alternative : alternatives) RETURN_IF_ERROR(CheckExpression(where, alternative));
      result_.numbers.emplace_back(name, std::move(alternatives));
    }
    return absl::OkStatus();
  }

  absl::Status ReadRefused(const Json& json) {
    if (!json.contains("refuse")) return absl::OkStatus();
    if (!json["refuse"].is_array()) return Invalid("refuse", "is no list");
    for (const Json& entry : json["refuse"]) {
      RETURN_IF_ERROR(CheckKeys("refuse", entry, {"key", "is", "because"}));
      if (!entry.contains("key") || !entry["key"].is_string() || !entry.contains("is") || !entry.contains("because") ||
          !entry["because"].is_string()) {
        return Invalid("refuse", "is to have a key, the value that it must not have, and because");
      }
      result_.refused.push_back({entry["key"].get<std::string>(), entry["is"], entry["because"].get<std::string>()});
    }
    return absl::OkStatus();
  }

  absl::Status ReadTensors(const Json& json) {
    if (!json.contains("tensors") || !json["tensors"].is_object())
      return Invalid("tensors", "is missing, or no object");
    for (const auto& [pattern, value] : json["tensors"].items()) {
      const std::string where = absl::StrCat("tensors: ", pattern);
      const auto names = ExpandBraces(pattern);
      if (names.empty()) return Invalid(where, "its braces do not fit, or stand for too many names");
      for (const std::string& name : names) {
        ASSIGN_OR_RETURN(TensorRule rule, ReadRule(where, value));
        rule.is_expert = rule.stacked || absl::StrContains(name, kExpertPlaceholder);
        if (!AddRule(name, std::move(rule))) return Invalid(where, absl::StrCat(Quote(name), " is there twice"));
      }
    }
    return absl::OkStatus();
  }

  bool AddRule(const std::string& name, TensorRule rule) {
    if (absl::EndsWith(name, ".*")) {
      return result_.subtrees.emplace(name.substr(0, name.size() - 1), std::move(rule)).second;
    }
    return result_.tensors.emplace(name, std::move(rule)).second;
  }

  absl::StatusOr<TensorRule> ReadRule(const std::string& where, const Json& value) const {
    if (value.is_string()) return ReadRule(where, Json{{"split", value}});
    RETURN_IF_ERROR(CheckKeys(
        where, value,
        {"split", "count", "size", "replicate", "parts", "axis", "stacked", "stage", "quantize", "keep_dtype"}));
    TensorRule rule;
    static const std::map<std::string, Split> kSplits = {
        {"replicated", Split::kReplicated}, {"column", Split::kColumn}, {"row", Split::kRow}, {"vocab", Split::kVocab}};
    static const std::map<std::string, Stage> kStages = {{"first", Stage::kFirst}, {"last", Stage::kLast}};
    if (!value.contains("split")) return Invalid(where, "has no split");
    RETURN_IF_ERROR(ReadWord(where, value, "split", kSplits, rule.split));
    RETURN_IF_ERROR(ReadWord(where, value, "stage", kStages, rule.stage));
    RETURN_IF_ERROR(ReadSwitch(where, value, "stacked", rule.stacked));
    RETURN_IF_ERROR(ReadSwitch(where, value, "quantize", rule.quantize));
    RETURN_IF_ERROR(ReadSwitch(where, value, "keep_dtype", rule.keep_dtype));
    if (value.contains("axis")) {
      if (!value["axis"].is_number_unsigned() || value["axis"] > 2) return Invalid(where, "axis is none of 0, 1 and 2");
      rule.axis = value["axis"].get<int>();
    }
    RETURN_IF_ERROR(ReadParts(where, value, rule));
    return rule;
  }

  absl::Status ReadParts(const std::string& where, const Json& value, TensorRule& rule) const {
    if (!value.contains("parts")) {
      ASSIGN_OR_RETURN(rule.parts.emplace_back(), ReadPart(where, value));
      return absl::OkStatus();
    }
    if (!value["parts"].is_array() || value["parts"].empty() || rule.split != Split::kColumn) {
      return Invalid(where, "parts is to be a list, of a column split");
    }
    if (value.contains("count") || value.contains("size") || value.contains("replicate")) {
      return Invalid(where, "has both parts and what its parts are to have");
    }
    for (const Json& part : value["parts"]) {
      RETURN_IF_ERROR(CheckKeys(where, part, {"count", "size", "replicate"}));
      if (!part.contains("count")) return Invalid(where, "a part has no count");
      ASSIGN_OR_RETURN(rule.parts.emplace_back(), ReadPart(where, part));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<SplitPart> ReadPart(const std::string& where, const Json& value) const {
    SplitPart part;
    for (const auto& [key, text] : {std::pair{"count", &part.count}, std::pair{"size", &part.size}}) {
      if (!value.contains(key)) continue;
      if (!value[key].is_string()) return Invalid(where, absl::StrCat(key, " is no string"));
      *text = value[key].get<std::string>();
      RETURN_IF_ERROR(CheckExpression(where, *text));
    }
    if (value.contains("size") && part.count.empty()) return Invalid(where, "has a size and no count");
    RETURN_IF_ERROR(ReadSwitch(where, value, "replicate", part.replicate));
    return part;
  }

  template <typename Enum>
  absl::Status ReadWord(const std::string& where, const Json& value, const char* key,
                        const std::map<std::string, Enum>& words, Enum& result) const {
    if (!value.contains(key)) return absl::OkStatus();
    const auto it = value[key].is_string() ? words.find(value[key].get<std::string>()) : words.end();
    if (it == words.end()) {
      return Invalid(
          where, absl::StrCat(key, " is none of ", absl::StrJoin(words, ", ", [](std::string* out, const auto& word) {
                                out->append(word.first);
                              })));
    }
    result = it->second;
    return absl::OkStatus();
  }

  absl::Status ReadSwitch(const std::string& where, const Json& value, const char* key, bool& result) const {
    if (!value.contains(key)) return absl::OkStatus();
    if (!value[key].is_boolean()) return Invalid(where, absl::StrCat(key, " is not true or false"));
    result = value[key].get<bool>();
    return absl::OkStatus();
  }

  absl::Status ReadFused(const Json& json) {
    if (!json.contains("fused")) return absl::OkStatus();
    if (!json["fused"].is_object()) return Invalid("fused", "is no object");
    for (const auto& [name, value] : json["fused"].items()) RETURN_IF_ERROR(ReadFusedRule(name, value));
    return absl::OkStatus();
  }

  absl::Status ReadFusedRule(const std::string& name, const Json& value) {
    const std::string where = absl::StrCat("fused: ", name);
    FusedRule rule;
    rule.name = name;
    const bool is_object = value.is_object();
    if (is_object) {
      RETURN_IF_ERROR(CheckKeys(where, value, {"of", "transpose", "first_rank_only"}));
      RETURN_IF_ERROR(ReadSwitch(where, value, "transpose", rule.transpose));
      RETURN_IF_ERROR(ReadSwitch(where, value, "first_rank_only", rule.first_rank_only));
      if (!value.contains("of")) return Invalid(where, "does not say of what");
    }
    ASSIGN_OR_RETURN(rule.sources, ReadStrings(where, is_object ? value["of"] : value));
    for (const std::string& source : rule.sources) {
      const auto it = result_.tensors.find(source);
      if (it == result_.tensors.end()) return Invalid(where, absl::StrCat(Quote(source), " is not among tensors"));
      const bool stacks = absl::StrContains(source, kExpertPlaceholder);
      if (&source != &rule.sources.front() && stacks != rule.stacks_experts) {
        return Invalid(where, "some of its sources are experts and some are not");
      }
      rule.stacks_experts = stacks;
      if (it->second.stacked && rule.sources.size() > 1)
        return Invalid(where, "puts stacked tensors behind each other");
    }
    result_.fused.push_back(std::move(rule));
    return absl::OkStatus();
  }

  Architecture result_;
};

}  // namespace

absl::StatusOr<Architecture> ParseArchitecture(const std::string& label, const std::string& text) {
  return Parser(label).Parse(text);
}

}  // namespace weightbroker
