// Numbers that a model's config gives, and what is worked out of them: "num_attention_heads * head_dim".
//
//   ConfigNumbers numbers(config, {"", "text_config"});
//   RETURN_IF_ERROR(numbers.Define("kv_heads", {"num_key_value_heads", "num_attention_heads"}));
//   ASSIGN_OR_RETURN(const int64_t rows, numbers.Evaluate("kv_heads * head_dim"));     // CONFIG_MALFORMED: what is
//                                                                                      // missing
// An expression is names and integers with + * / between, from left to right, * and / first. Names are those defined,
// then keys of the config. Thread-safe once everything is defined.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace weightbroker {

class ConfigNumbers {
 public:
  // Keys are looked for in each of `sections` of the config, in that order; "" is its top. `config` outlives this.
  ConfigNumbers(const nlohmann::json& config, const std::vector<std::string>& sections);

  // Gives `name` the value of the first of `alternatives` all of whose names are there. Where none is, only using
  // `name` is an error, which names them all.
  void Define(const std::string& name, const std::vector<std::string>& alternatives);

  // CONFIG_MALFORMED for a name that is not there or not a positive integer, and for a division with a remainder.
  absl::StatusOr<int64_t> Evaluate(std::string_view expression) const;

  // The value of a key, or null if there is none or it is null.
  const nlohmann::json* FindKey(std::string_view key) const;

  // Whether `expression` could be one.
  static bool IsWellFormed(std::string_view expression);

 private:
  bool HasAllNames(std::string_view expression) const;
  absl::StatusOr<int64_t> ValueOf(std::string_view name) const;

  std::vector<const nlohmann::json*> sections_;
  std::map<std::string, int64_t, std::less<>> defined_;
  std::map<std::string, std::string, std::less<>> missing_;  // name -> the expressions tried
};

}  // namespace weightbroker
