#include "common/desired/desired_check.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/desired/desired_request.h"

namespace weightbroker {
namespace {

std::string PointerToModel(size_t set) { return absl::StrCat("/sets/", set, "/model"); }

// What stands before the colon; empty for an absolute path, and for what is neither.
std::string RootOf(const std::string& model) {
  const size_t colon = model.find(':');
  return model[0] == '/' || colon == std::string::npos ? "" : model.substr(0, colon);
}

}  // namespace

absl::Status CheckModelNames(const DesiredState& desired, const std::string& file) {
  for (size_t i = 0; i < desired.sets.size(); ++i) {
    const std::string& model = desired.sets[i].model;
    if (model[0] == '/' || !RootOf(model).empty()) continue;
    return DesiredStateError(file, PointerToModel(i),
                             absl::StrCat(Quote(model), " is neither root:relative/path nor an absolute path"),
                             Printable(model), "root:relative/path or an absolute path");
  }
  return absl::OkStatus();
}

absl::Status CheckModelRoots(const DesiredState& desired, const std::vector<std::string>& roots,
                             const std::string& file) {
  RETURN_IF_ERROR(CheckModelNames(desired, file));
  for (size_t i = 0; i < desired.sets.size(); ++i) {
    const std::string root = RootOf(desired.sets[i].model);
    if (root.empty() || std::find(roots.begin(), roots.end(), root) != roots.end()) continue;
    const std::string known = roots.empty() ? "none" : absl::StrJoin(roots, ", ");
    return DesiredStateError(
        file, PointerToModel(i),
        absl::StrCat("there is no model root ", Quote(root), "; there are: ", known, " (--model_roots)"),
        Printable(root), known);
  }
  return absl::OkStatus();
}

absl::Status CheckDesiredFile(FileSystem& files, const std::string& file, const std::vector<std::string>& roots) {
  ASSIGN_OR_RETURN(const DesiredState desired, ReadDesiredFile(files, file));
  RETURN_IF_ERROR(ToRegisterRequests(desired, file).status());
  return CheckModelRoots(desired, roots, file);
}

}  // namespace weightbroker
