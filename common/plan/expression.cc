#include "common/plan/expression.h"

#include <cctype>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"

namespace weightbroker {
namespace {

// One name or number and the operator before it.
struct Term {
  char op = '+';
  std::string_view text;
};

bool IsWordChar(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }
bool IsNumber(std::string_view text) { return std::isdigit(static_cast<unsigned char>(text.front())) != 0; }

// Empty if `expression` is not well-formed.
std::vector<Term> Split(std::string_view expression) {
  std::vector<Term> terms;
  size_t at = 0;
  const auto skip_spaces = [&] {
    while (at < expression.size() && expression[at] == ' ') ++at;
  };
  for (char op = '+';; op = expression[at++]) {
    skip_spaces();
    const size_t begin = at;
    while (at < expression.size() && IsWordChar(expression[at])) ++at;
    if (begin == at || at - begin > 64) return {};
    terms.push_back({op, expression.substr(begin, at - begin)});
    skip_spaces();
    if (at == expression.size()) return terms;
    if (std::string_view("+*/").find(expression[at]) == std::string_view::npos) return {};
  }
}

absl::Status Malformed(const std::string& text, const std::string& key) {
  return MakeError(Reason::kConfigMalformed, absl::StrCat("config.json: ", text),
                   {{"file", "config.json"}, {"key", key}});
}

}  // namespace

ConfigNumbers::ConfigNumbers(const nlohmann::json& config, const std::vector<std::string>& sections) {
  for (const std::string& section : sections) {
    if (section.empty()) {
      sections_.push_back(&config);
    } else if (const auto it = config.find(section); it != config.end() && it->is_object()) {
      sections_.push_back(&*it);
    }
  }
}

bool ConfigNumbers::IsWellFormed(std::string_view expression) { return !Split(expression).empty(); }

const nlohmann::json* ConfigNumbers::FindKey(std::string_view key) const {
  for (const nlohmann::json* section : sections_) {
    const auto it = section->find(std::string(key));
    if (it != section->end() && !it->is_null()) return &*it;
  }
  return nullptr;
}

bool ConfigNumbers::HasAllNames(std::string_view expression) const {
  for (const Term& term : Split(expression)) {
    if (!IsNumber(term.text) && defined_.find(term.text) == defined_.end() && FindKey(term.text) == nullptr)
      return false;
  }
  return true;
}

void ConfigNumbers::Define(const std::string& name, const std::vector<std::string>& alternatives) {
  for (const std::string& alternative : alternatives) {
    if (!HasAllNames(alternative)) continue;
    const auto value = Evaluate(alternative);
    if (!value.ok()) continue;
    defined_[name] = *value;
    return;
  }
  missing_[name] = absl::StrJoin(alternatives, " or ");
}

absl::StatusOr<int64_t> ConfigNumbers::ValueOf(std::string_view name) const {
  if (const auto it = defined_.find(name); it != defined_.end()) return it->second;
  const std::string text(name);
  if (const auto it = missing_.find(name); it != missing_.end()) {
    return Malformed(absl::StrCat("it has no usable ", it->second, ", of which ", text,
                                  " is worked out, and that is needed to split the weights"),
                     text);
  }
  const nlohmann::json* const value = FindKey(name);
  if (value == nullptr)
    return Malformed(absl::StrCat("it has no ", text, ", which is needed to split the weights"), text);
  if (!value->is_number_integer() || *value < 1 || *value > std::numeric_limits<int32_t>::max()) {
    return Malformed(absl::StrCat(text, " is no positive integer"), text);
  }
  return value->get<int64_t>();
}

absl::StatusOr<int64_t> ConfigNumbers::Evaluate(std::string_view expression) const {
  const auto too_large = [&] {
    return Malformed(absl::StrCat(std::string(expression), " is too large"), std::string(expression));
  };
  int64_t sum = 0;
  int64_t product = 0;
  for (const Term& term : Split(expression)) {
    int64_t value = 0;
    if (IsNumber(term.text)) {
      if (!absl::SimpleAtoi(ToAbsl(term.text), &value))
        return Malformed("a number is too large", std::string(term.text));
    } else {
      ASSIGN_OR_RETURN(value, ValueOf(term.text));
    }
    if (term.op == '+') {
      if (__builtin_add_overflow(sum, product, &sum)) return too_large();
      product = value;
    } else if (term.op == '*') {
      if (__builtin_mul_overflow(product, value, &product)) return too_large();
    } else {
      if (value == 0 || product % value != 0) {
        return Malformed(absl::StrCat("in ", std::string(expression), ", ", product, " is no multiple of ", value),
                         std::string(term.text));
      }
      product /= value;
    }
  }
  if (__builtin_add_overflow(sum, product, &sum)) return too_large();
  return sum;
}

}  // namespace weightbroker
