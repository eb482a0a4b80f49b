// What each tensor of a checkpoint is to its architecture: the rule that describes it, and its layer and expert.
// Thread-safe: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"
#include "common/plan/architecture_rules.h"

namespace weightbroker {

enum class Parameter {
  kWeight,
  kBias,
  kScale,  // "weight_scale_inv" of block-wise FP8
  kWhole,  // a tensor that the architecture describes by its whole name
};

struct TensorRole {
  int32_t tensor = 0;  // into Checkpoint::tensors
  const TensorRule* rule = nullptr;
  // The key of `rule`: a module, or for kWhole a tensor, with {layer} and {expert} for numbers. For what lies in a
  // subtree, the subtree.
  std::string key;
  Parameter parameter = Parameter::kWhole;
  int64_t layer = -1;    // -1: none
  int64_t expert = -1;   // -1: none
  int32_t partner = -1;  // of an FP8 weight its scale's tensor, of a scale its weight's; -1: none
  // What the file's name begins with, where the templates have something else.
  std::string_view prefix;
  std::string_view canonical_prefix;
};

// One for each tensor of the checkpoint, in its order. ARCHITECTURE_MISMATCH for a tensor that no rule describes.
absl::StatusOr<std::vector<TensorRole>> FindTensorRoles(const Checkpoint& checkpoint, const Architecture& architecture);

// The rule for a name that need not be a tensor's: of a tied weight. Null if there is none.
const TensorRule* FindRule(const Architecture& architecture, const std::string& name);

// `fused_name` with the role's layer and parameter in place of the placeholders, and its file's own prefix.
std::string NameFused(const std::string& fused_name, const TensorRole& role);

inline constexpr char kScaleSuffix[] = "_scale_inv";

}  // namespace weightbroker
