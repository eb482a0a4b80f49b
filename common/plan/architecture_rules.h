// What an architecture file says, parsed. See docs/architectures.md for the meaning of each key.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace weightbroker {

enum class Split {
  kReplicated,  // whole on every rank
  kColumn,      // by output features: the first dimension of a weight, and its bias
  kRow,         // by input features: the second dimension of a weight; its bias is whole
  kVocab,       // by rows, filled up with zeros to a multiple of 64
};

// Where a tensor is that belongs to no layer.
enum class Stage { kEvery, kFirst, kLast };

// `count` units of `size` rows or columns each; ranks get whole units.
struct SplitPart {
  std::string count;       // expression; empty for as many as the dimension is long
  std::string size = "1";  // expression
  bool replicate = false;  // with more ranks than units, ranks share one: unit = rank / (ranks / units)
};

struct TensorRule {
  Split split = Split::kReplicated;
  std::vector<SplitPart> parts;  // of kColumn and kRow: one, or those that a tensor has behind each other; never empty
  int axis = -1;                 // which dimension is split; -1 for the one that `split` says
  bool is_expert = false;        // its name has {expert}, or it is `stacked`: split by the places of experts
  bool stacked = false;          // its first dimension is the experts
  Stage stage = Stage::kEvery;
  bool quantize = false;    // quantized on the fly
  bool keep_dtype = false;  // not converted
};

// What the layout "fused" makes of one or more modules.
struct FusedRule {
  std::string name;                  // template: "model.layers.{layer}.self_attn.qkv_proj.{parameter}"
  std::vector<std::string> sources;  // templates of modules, in the order in which they are put behind each other
  bool stacks_experts = false;       // the sources have {expert}: the rank's experts become the first dimension
  bool transpose = false;            // exchange the last two dimensions
  bool first_rank_only = false;      // zeros on every rank of a group but the first, which is to add it once
};

// Above what is served as it is, a config is refused in which `key` is `value`.
struct RefusedConfig {
  std::string key;
  nlohmann::json value;
  std::string because;
};

struct Architecture {
  std::string label;                            // of its file
  std::vector<std::string> names;               // as configs list them
  std::vector<std::string> sections;            // of the config, in which numbers are looked for
  std::map<std::string, std::string> prefixes;  // of tensor names -> what stands for it in templates
  std::vector<std::pair<std::string, std::vector<std::string>>> numbers;  // name -> alternatives, in file order
  std::vector<RefusedConfig> refused;
  int64_t max_tensor_parallel_size = 0;                     // 0: no limit
  std::map<std::string, TensorRule, std::less<>> tensors;   // by template of a module, or of a whole name
  std::map<std::string, TensorRule, std::less<>> subtrees;  // "vision_tower." -> everything below
  std::vector<FusedRule> fused;
};

inline constexpr char kLayerPlaceholder[] = "{layer}";
inline constexpr char kExpertPlaceholder[] = "{expert}";
inline constexpr char kParameterPlaceholder[] = "{parameter}";

}  // namespace weightbroker
