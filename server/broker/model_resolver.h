// Where models may lie. The roots are the grant: who may call Register may load what is under them, and nothing else.
//
//   ASSIGN_OR_RETURN(auto resolver, ModelResolver::Create(RealFileSystem(), {{"models", "/srv/models"}}));
//   auto folder = resolver.Resolve("models:llama/8b");       // or "/srv/models/llama/8b"
//   if (!folder.ok()) return folder.status();                // MODEL_ROOT_UNKNOWN, MODEL_OUTSIDE_ROOTS,
//   MODEL_NOT_FOUND
//
// Symbolic links are resolved first and the result is compared with the roots afterwards, component by component.
// Thread- safe after creation.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/file.h"

namespace weightbroker {

struct ModelRoot {
  std::string name;  // what stands before the colon
  std::string path;  // absolute
};

class ModelResolver {
 public:
  // CONFIGURATION_INVALID naming the root if one is not an absolute path of a folder that is there, or a name is twice
  // there. `file_system` must outlive the resolver.
  static absl::StatusOr<ModelResolver> Create(FileSystem& file_system, const std::vector<ModelRoot>& roots);

  // The folder that `model` ("name:relative/path" or an absolute path) leads to, absolute, symbolic links resolved.
  // INVALID_ARGUMENT for other words. What lies outside the roots is MODEL_OUTSIDE_ROOTS whether it is there or not.
  absl::StatusOr<std::string> Resolve(const std::string& model) const;

  // Where a folder that is gone was: what is left of the path resolved, and the rest added to it. Fails as Resolve does
  // but for MODEL_NOT_FOUND.
  absl::StatusOr<std::string> ResolveGone(const std::string& model) const;

  // MODEL_OUTSIDE_ROOTS, naming both, unless `resolved_path` (symbolic links resolved) lies inside a root. `named_as`
  // is what led there.
  absl::Status CheckInside(const std::string& resolved_path, const std::string& named_as) const;

  const std::vector<ModelRoot>& roots() const { return roots_; }

 private:
  ModelResolver(FileSystem& file_system, std::vector<ModelRoot> roots)
      : file_system_(&file_system), roots_(std::move(roots)) {}

  absl::StatusOr<std::string> ExpandRoot(const std::string& model) const;
  bool IsInside(const std::string& resolved_path) const;

  FileSystem* file_system_;
  std::vector<ModelRoot> roots_;  // paths resolved
};

// A view of a file system in which only what lies inside the roots can be opened, whatever symbolic links in a model's
// folder say: a hub cache's lead to blobs elsewhere, which must lie inside a root too.
class RootedFileSystem : public FileSystem {
 public:
  // Both must outlive this object.
  RootedFileSystem(FileSystem& base, const ModelResolver& resolver) : base_(base), resolver_(resolver) {}

  absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path, ReadMode mode) override;
  absl::StatusOr<FileStat> Stat(const std::string& path) override;
  absl::StatusOr<std::string> RealPath(const std::string& path) override;
  absl::StatusOr<std::vector<std::string>> ListFolder(const std::string& path) override;

 private:
  FileSystem& base_;
  const ModelResolver& resolver_;
};

}  // namespace weightbroker
