// A set of modules, as an ignore list names them. Thread-safe once built.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_set.h"

namespace weightbroker {

// Engines and tools name the same module with more or fewer wrappers around it
// ("model.language_model.layers.0.mlp.gate", "model.layers.0.mlp.gate"), as a whole path or only by its end ("gate",
// "lm_head", "lm_head.weight"), and projections that some of them fuse by either name: "qkv_proj" is "q_proj", "k_proj"
// and "v_proj", and those three are it. Names match at dots only: "mlp.gate" is not "mlp.gate_up_proj", and "layers.8"
// is not "layers.80".
class ModuleSet {
 public:
  explicit ModuleSet(const std::vector<std::string>& names);

  // Whether `tensor` is, or lies in, a module of the set.
  bool Covers(std::string_view tensor) const;

  // Those of `names`, in their order, by which none of `tensors` is covered, neither alone nor together with the
  // others.
  static std::vector<std::string> Unused(const std::vector<std::string>& names,
                                         const std::vector<std::string_view>& tensors);

  // Whether `name` is a plain module name: letters, digits, '_', '-' and single dots between. Anything else would be a
  // pattern, which engines read differently.
  static bool IsPlainName(std::string_view name);

 private:
  // Names of the set by which tensors are covered, as the set keeps them.
  struct Used {
    absl::flat_hash_set<std::string> paths;
    absl::flat_hash_set<std::string> fragments;
  };

  bool CoversAsSpelled(std::string_view tensor) const;
  void CollectUsed(std::string_view tensor, Used* used) const;
  void CollectUsedAsSpelled(std::string_view tensor, Used* used) const;

  absl::flat_hash_set<std::string> paths_;      // from the root, wrappers taken off
  absl::flat_hash_set<std::string> fragments_;  // anywhere
};

}  // namespace weightbroker
