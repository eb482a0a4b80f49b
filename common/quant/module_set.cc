#include "common/quant/module_set.h"

#include <algorithm>
#include <cctype>

namespace weightbroker {
namespace {

// What a multi-modal model puts around its text model.
constexpr std::string_view kWrappers[] = {"model.", "language_model."};

// What engines fuse, and of what.
struct FusedModule {
  std::string_view fused;
  std::vector<std::string_view> parts;
};
const std::vector<FusedModule>& FusedModules() {
  static const auto* const modules = new std::vector<FusedModule>{
      {"qkv_proj", {"q_proj", "k_proj", "v_proj"}},
      {"gate_up_proj", {"gate_proj", "up_proj"}},
      {"w13", {"w1", "w3"}},
  };
  return *modules;
}

// `name` with the segment `from` exchanged for `to`; empty if it has no such segment.
std::string WithSegment(std::string_view name, std::string_view from, std::string_view to) {
  for (size_t begin = 0; begin < name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    if (name.substr(begin, end - begin) == from) {
      return std::string(name.substr(0, begin)).append(to).append(name.substr(end));
    }
    begin = end + 1;
  }
  return {};
}

std::string_view WithoutWrappers(std::string_view name) {
  bool changed = true;
  while (changed) {
    changed = false;
    for (const std::string_view wrapper : kWrappers) {
      if (name.substr(0, wrapper.size()) != wrapper) continue;
      name.remove_prefix(wrapper.size());
      changed = true;
    }
  }
  return name;
}

// Calls `visit` with each part of `name` that begins at its start and ends at a dot or at its end, until it returns
// true.
template <typename Visit>
bool AnyPrefix(std::string_view name, Visit visit) {
  for (size_t dot = name.find('.'); dot != std::string_view::npos; dot = name.find('.', dot + 1)) {
    if (visit(name.substr(0, dot))) return true;
  }
  return visit(name);
}

}  // namespace

ModuleSet::ModuleSet(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const std::string_view path = WithoutWrappers(name);
    (path.size() < name.size() ? paths_ : fragments_).insert(std::string(path));
  }
}

std::vector<std::string> ModuleSet::Unused(const std::vector<std::string>& names,
                                           const std::vector<std::string_view>& tensors) {
  const ModuleSet set(names);
  Used used;
  for (const std::string_view tensor : tensors) set.CollectUsed(tensor, &used);
  std::vector<std::string> unused;
  for (const std::string& name : names) {
    const std::string_view path = WithoutWrappers(name);
    const auto& of_its_kind = path.size() < name.size() ? used.paths : used.fragments;
    if (!of_its_kind.contains(std::string(path))) unused.push_back(name);
  }
  return unused;
}

void ModuleSet::CollectUsed(std::string_view tensor, Used* used) const {
  CollectUsedAsSpelled(tensor, used);
  for (const FusedModule& module : FusedModules()) {
    for (const std::string_view part : module.parts) {
      const std::string fused = WithSegment(tensor, part, module.fused);
      if (!fused.empty()) CollectUsedAsSpelled(fused, used);
    }
    if (WithSegment(tensor, module.fused, module.fused).empty()) continue;
    const auto is_covered = [&](std::string_view part) {
      return CoversAsSpelled(WithSegment(tensor, module.fused, part));
    };
    if (!std::all_of(module.parts.begin(), module.parts.end(), is_covered)) continue;
    for (const std::string_view part : module.parts) {
      CollectUsedAsSpelled(WithSegment(tensor, module.fused, part), used);
    }
  }
}

void ModuleSet::CollectUsedAsSpelled(std::string_view tensor, Used* used) const {
  const auto collect = [](const absl::flat_hash_set<std::string>& names, absl::flat_hash_set<std::string>& found) {
    return [&](std::string_view part) {
      const auto name = names.find(std::string(part));
      if (name != names.end()) found.insert(*name);
      return false;  // there may be more
    };
  };
  AnyPrefix(WithoutWrappers(tensor), collect(paths_, used->paths));
  while (!fragments_.empty()) {
    AnyPrefix(tensor, collect(fragments_, used->fragments));
    const size_t dot = tensor.find('.');
    if (dot == std::string_view::npos) return;
    tensor.remove_prefix(dot + 1);
  }
}

bool ModuleSet::Covers(std::string_view tensor) const {
  if (paths_.empty() && fragments_.empty()) return false;
  if (CoversAsSpelled(tensor)) return true;
  for (const FusedModule& module : FusedModules()) {
    for (const std::string_view part : module.parts) {
      const std::string fused = WithSegment(tensor, part, module.fused);
      if (!fused.empty() && CoversAsSpelled(fused)) return true;
    }
    if (WithSegment(tensor, module.fused, module.fused).empty()) continue;
    if (std::all_of(module.parts.begin(), module.parts.end(),
                    [&](std::string_view part) { return CoversAsSpelled(WithSegment(tensor, module.fused, part)); })) {
      return true;
    }
  }
  return false;
}

bool ModuleSet::CoversAsSpelled(std::string_view tensor) const {
  const auto is_path = [this](std::string_view part) { return paths_.contains(std::string(part)); };
  const auto is_fragment = [this](std::string_view part) { return fragments_.contains(std::string(part)); };
  if (AnyPrefix(WithoutWrappers(tensor), is_path)) return true;
  if (fragments_.empty()) return false;
  while (true) {
    if (AnyPrefix(tensor, is_fragment)) return true;
    const size_t dot = tensor.find('.');
    if (dot == std::string_view::npos) return false;
    tensor.remove_prefix(dot + 1);
  }
}

bool ModuleSet::IsPlainName(std::string_view name) {
  const auto is_plain = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-' || c == '.';
  };
  return !name.empty() && name.front() != '.' && name.back() != '.' && name.find("..") == std::string_view::npos &&
         std::all_of(name.begin(), name.end(), is_plain);
}

}  // namespace weightbroker
