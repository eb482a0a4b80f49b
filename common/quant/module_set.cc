#include "common/quant/module_set.h"

#include <algorithm>
#include <cctype>

namespace weightbroker {
namespace {

// What a multi-modal model puts around its text model.
constexpr std::string_view kWrappers[] = {"model.", "language_model."};

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

bool ModuleSet::Covers(std::string_view tensor) const {
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
