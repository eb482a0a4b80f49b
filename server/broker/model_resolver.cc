#include "server/broker/model_resolver.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

constexpr size_t kMaxModelBytes = 4096;

// Component by component: "/models2" is not inside "/models".
bool LiesInside(const std::string& path, const std::string& root) {
  if (root == "/") return true;
  return path.compare(0, root.size(), root) == 0 && (path.size() == root.size() || path[root.size()] == '/');
}

bool HasControlCharacters(const std::string& text) {
  return std::any_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < ' ' || c == 0x7F; });
}

std::string JoinRoots(const std::vector<ModelRoot>& roots) {
  std::string joined;
  for (const ModelRoot& root : roots) {
    absl::StrAppend(&joined, joined.empty() ? "" : ", ", root.name, "=", root.path);
  }
  return joined.empty() ? "none are configured" : joined;
}

absl::Status OutsideRoots(const std::string& path, const std::string& named_as, const std::vector<ModelRoot>& roots) {
  const std::string via = named_as == path ? "" : absl::StrCat(" (named as ", named_as, ")");
  return MakeError(Reason::kModelOutsideRoots,
                   absl::StrCat(path, via, " lies outside the model roots (", JoinRoots(roots),
                                "): move it there, or start the service with another --model_roots"),
                   {{"path", path}, {"named_as", named_as}, {"model_roots", JoinRoots(roots)}});
}

absl::Status BadRoot(const ModelRoot& root, const std::string& what) {
  return MakeError(Reason::kConfigurationInvalid, absl::StrCat("model root ", root.name, "=", root.path, " ", what),
                   {{"name", root.name}, {"path", root.path}});
}

}  // namespace

absl::StatusOr<ModelResolver> ModelResolver::Create(FileSystem& file_system, const std::vector<ModelRoot>& roots) {
  std::vector<ModelRoot> resolved;
  for (const ModelRoot& root : roots) {
    if (root.name.empty() || root.name.find_first_of(":/") != std::string::npos) {
      return BadRoot(root, "needs a name without a colon or slash");
    }
    if (root.path.empty() || root.path[0] != '/') return BadRoot(root, "needs an absolute path");
    if (std::any_of(resolved.begin(), resolved.end(), [&](const ModelRoot& r) { return r.name == root.name; })) {
      return BadRoot(root, "has a name that another root has too");
    }
    const auto path = file_system.RealPath(root.path);
    if (!path.ok()) return BadRoot(root, absl::StrCat("cannot be used: ", path.status().message()));
    const auto stat = file_system.Stat(*path);
    if (!stat.ok()) return BadRoot(root, absl::StrCat("cannot be used: ", stat.status().message()));
    if (!stat->is_directory) return BadRoot(root, "is not a folder");
    resolved.push_back({root.name, *path});
  }
  return ModelResolver(file_system, std::move(resolved));
}

absl::StatusOr<std::string> ModelResolver::Resolve(const std::string& model) const {
  ASSIGN_OR_RETURN(const std::string path, ExpandRoot(model));
  auto resolved = file_system_->RealPath(path);
  if (!resolved.ok()) {
    // Whether there is anything outside the roots is not for callers to find out.
    const std::string normal = std::filesystem::path(path).lexically_normal().string();
    if (!IsInside(normal)) return OutsideRoots(normal, model, roots_);
    return resolved.status();
  }
  RETURN_IF_ERROR(CheckInside(*resolved, model));
  ASSIGN_OR_RETURN(const FileStat stat, file_system_->Stat(*resolved));
  if (!stat.is_directory) {
    return MakeError(Reason::kModelNotFound,
                     absl::StrCat(*resolved, " is not a folder: name the folder that holds config.json"),
                     {{"path", *resolved}});
  }
  return resolved;
}

absl::StatusOr<std::string> ModelResolver::ResolveGone(const std::string& model) const {
  ASSIGN_OR_RETURN(const std::string path, ExpandRoot(model));
  std::filesystem::path there = std::filesystem::path(path).lexically_normal();
  std::filesystem::path gone;
  auto resolved = file_system_->RealPath(there.string());
  while (!resolved.ok() && there.has_relative_path()) {
    if (there.has_filename()) gone = gone.empty() ? there.filename() : there.filename() / gone;
    there = there.parent_path();
    resolved = file_system_->RealPath(there.string());
  }
  RETURN_IF_ERROR(resolved.status());
  const std::string whole = gone.empty() ? *resolved : (std::filesystem::path(*resolved) / gone).string();
  RETURN_IF_ERROR(CheckInside(whole, model));
  return whole;
}

absl::StatusOr<std::string> ModelResolver::ExpandRoot(const std::string& model) const {
  if (model.empty() || model.size() > kMaxModelBytes || HasControlCharacters(model)) {
    return MakeError(Reason::kInvalidArgument,
                     absl::StrCat("spec.model must be 1 to ", kMaxModelBytes,
                                  " bytes without control characters: \"name:relative/path\" or an absolute path"),
                     {{"field", "spec.model"}});
  }
  if (model[0] == '/') return model;
  const size_t colon = model.find(':');
  if (colon == std::string::npos || colon == 0) {
    return MakeError(Reason::kInvalidArgument,
                     absl::StrCat("spec.model \"", model, "\" is neither \"name:relative/path\" nor an absolute path"),
                     {{"field", "spec.model"}, {"model", model}});
  }
  const std::string name = model.substr(0, colon);
  const std::string relative = model.substr(colon + 1);
  for (const ModelRoot& root : roots_) {
    if (root.name == name) return absl::StrCat(root.path, "/", relative);
  }
  return MakeError(
      Reason::kModelRootUnknown,
      absl::StrCat("spec.model \"", model, "\" names the model root \"", name, "\"; there are: ", JoinRoots(roots_)),
      {{"model_root", name}, {"model_roots", JoinRoots(roots_)}});
}

absl::Status ModelResolver::CheckInside(const std::string& resolved_path, const std::string& named_as) const {
  return IsInside(resolved_path) ? absl::OkStatus() : OutsideRoots(resolved_path, named_as, roots_);
}

bool ModelResolver::IsInside(const std::string& resolved_path) const {
  return std::any_of(roots_.begin(), roots_.end(),
                     [&](const ModelRoot& root) { return LiesInside(resolved_path, root.path); });
}

absl::StatusOr<std::unique_ptr<File>> RootedFileSystem::Open(const std::string& path, ReadMode mode) {
  ASSIGN_OR_RETURN(const std::string resolved, RealPath(path));
  return base_.Open(resolved, mode);
}

absl::StatusOr<FileStat> RootedFileSystem::Stat(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string resolved, RealPath(path));
  return base_.Stat(resolved);
}

absl::StatusOr<std::vector<std::string>> RootedFileSystem::ListFolder(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string resolved, RealPath(path));
  return base_.ListFolder(resolved);
}

absl::StatusOr<std::string> RootedFileSystem::RealPath(const std::string& path) {
  ASSIGN_OR_RETURN(std::string resolved, base_.RealPath(path));
  RETURN_IF_ERROR(resolver_.CheckInside(resolved, path));
  return resolved;
}

}  // namespace weightbroker
