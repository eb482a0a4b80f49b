#include "common/plan/tensor_roles.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"

namespace weightbroker {
namespace {

constexpr char kWeightName[] = "weight";
constexpr char kBiasName[] = "bias";
constexpr char kScaleName[] = "weight_scale_inv";

const char* NameOf(Parameter parameter) {
  if (parameter == Parameter::kWeight) return kWeightName;
  if (parameter == Parameter::kBias) return kBiasName;
  return kScaleName;
}

std::optional<Parameter> ParameterNamed(std::string_view name) {
  if (name == kWeightName) return Parameter::kWeight;
  if (name == kBiasName) return Parameter::kBias;
  if (name == kScaleName) return Parameter::kScale;
  return std::nullopt;
}

bool IsIndex(std::string_view segment) {
  return !segment.empty() && segment.size() < 10 &&
         std::all_of(segment.begin(), segment.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
}

// A name whose first number is taken for the layer and whose second for the expert.
struct Template {
  std::string text;
  int64_t layer = -1;
  int64_t expert = -1;
};

Template ToTemplate(std::string_view name) {
  Template result;
  result.text.reserve(name.size() + 16);
  for (size_t begin = 0; begin <= name.size();) {
    const size_t dot = std::min(name.find('.', begin), name.size());
    const std::string_view segment = name.substr(begin, dot - begin);
    if (begin > 0) result.text.push_back('.');
    int64_t* const number = result.layer < 0 ? &result.layer : &result.expert;
    if (IsIndex(segment) && *number < 0 && absl::SimpleAtoi(ToAbsl(segment), number)) {
      result.text.append(number == &result.layer ? kLayerPlaceholder : kExpertPlaceholder);
    } else {
      result.text.append(segment);
    }
    begin = dot + 1;
  }
  return result;
}

class RoleFinder {
 public:
  explicit RoleFinder(const Architecture& architecture) : architecture_(architecture) {}

  // Without `tensor` and `partner`. Its rule is null if there is none.
  TensorRole Find(const std::string& name) const {
    TensorRole role;
    std::string_view rest = name;
    std::string canonical;
    for (const auto& [prefix, replacement] : architecture_.prefixes) {
      if (!absl::StartsWith(name, prefix) || prefix.size() < role.prefix.size()) continue;
      role.prefix = prefix;
      role.canonical_prefix = replacement;
    }
    canonical = absl::StrCat(ToAbsl(role.canonical_prefix), ToAbsl(rest.substr(role.prefix.size())));
    if (FindInSubtree(canonical, role) || FindInSubtree(name, role)) return role;
    FindByTemplate(ToTemplate(canonical), role);
    return role;
  }

 private:
  bool FindInSubtree(const std::string& name, TensorRole& role) const {
    for (const auto& [subtree, rule] : architecture_.subtrees) {
      if (!absl::StartsWith(name, subtree)) continue;
      role.rule = &rule;
      role.key = subtree;
      return true;
    }
    return false;
  }

  void FindByTemplate(const Template& name, TensorRole& role) const {
    role.layer = name.layer;
    role.expert = name.expert;
    if (FindKey(name.text, Parameter::kWhole, role)) return;
    const size_t dot = name.text.rfind('.');
    if (dot != std::string::npos) {
      const auto parameter = ParameterNamed(std::string_view(name.text).substr(dot + 1));
      if (parameter.has_value() && FindKey(name.text.substr(0, dot), *parameter, role)) return;
    }
    if (absl::EndsWith(name.text, kScaleSuffix)) {
      FindKey(name.text.substr(0, name.text.size() - (sizeof(kScaleSuffix) - 1)), Parameter::kScale, role);
    }
  }

  bool FindKey(const std::string& key, Parameter parameter, TensorRole& role) const {
    const auto it = architecture_.tensors.find(key);
    if (it == architecture_.tensors.end()) return false;
    role.rule = &it->second;
    role.key = key;
    role.parameter = parameter;
    return true;
  }

  const Architecture& architecture_;
};

absl::Status NoRule(const CheckpointTensor& tensor, const Architecture& architecture) {
  return MakeError(Reason::kArchitectureMismatch,
                   absl::StrCat("tensor ", Quote(tensor.name), " is not described by ", Printable(architecture.label),
                                ", so it is not known how to split it; docs/architectures.md shows how to describe it"),
                   {{"tensor", Printable(tensor.name)}, {"architecture_file", Printable(architecture.label)}});
}

// Makes weights and their scales partners, wherever in the checkpoint each of them lies.
void FindPartners(const Checkpoint& checkpoint, std::vector<TensorRole>& roles) {
  const auto& tensors = checkpoint.tensors;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (roles[i].parameter != Parameter::kScale) continue;
    const std::string weight = tensors[i].name.substr(0, tensors[i].name.size() - (sizeof(kScaleSuffix) - 1));
    const auto it =
        std::lower_bound(tensors.begin(), tensors.end(), weight,
                         [](const CheckpointTensor& tensor, const std::string& name) { return tensor.name < name; });
    if (it == tensors.end() || it->name != weight) continue;
    roles[i].partner = static_cast<int32_t>(it - tensors.begin());
    roles[static_cast<size_t>(it - tensors.begin())].partner = static_cast<int32_t>(i);
  }
}

}  // namespace

absl::StatusOr<std::vector<TensorRole>> FindTensorRoles(const Checkpoint& checkpoint,
                                                        const Architecture& architecture) {
  const RoleFinder finder(architecture);
  std::vector<TensorRole> roles;
  roles.reserve(checkpoint.tensors.size());
  for (const CheckpointTensor& tensor : checkpoint.tensors) {
    TensorRole role = finder.Find(tensor.name);
    if (role.rule == nullptr) return NoRule(tensor, architecture);
    role.tensor = static_cast<int32_t>(roles.size());
    roles.push_back(std::move(role));
  }
  FindPartners(checkpoint, roles);
  return roles;
}

const TensorRule* FindRule(const Architecture& architecture, const std::string& name) {
  return RoleFinder(architecture).Find(name).rule;
}

std::string NameFused(const std::string& fused_name, const TensorRole& role) {
  std::string name = fused_name;
  const std::string_view canonical = role.canonical_prefix;
  if (!role.prefix.empty() && absl::StartsWith(name, ToAbsl(canonical))) {
    name = absl::StrCat(ToAbsl(role.prefix), name.substr(canonical.size()));
  }
  if (role.parameter == Parameter::kScale && !absl::StrContains(name, kParameterPlaceholder)) name += kScaleSuffix;
  return absl::StrReplaceAll(
      name, {{kLayerPlaceholder, absl::StrCat(role.layer)},
             {kParameterPlaceholder, role.parameter == Parameter::kWhole ? "" : NameOf(role.parameter)}});
}

}  // namespace weightbroker
