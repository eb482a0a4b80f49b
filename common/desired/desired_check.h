// What else can be said of a file of --desired before anything is loaded; a service that starts says it, and so does
// --check_config.
//
//   if (const absl::Status status = CheckDesiredFile(RealFileSystem(), file, {"models"}); !status.ok()) return status;
//
// Thread-safe: all functions are pure, but for reading the file.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/base/file.h"
#include "common/desired/desired_state.h"

namespace weightbroker {

// CONFIGURATION_INVALID for a model that is neither "root:relative/path" nor an absolute path.
absl::Status CheckModelNames(const DesiredState& desired, const std::string& file);

// The same, and for one that names a root which is not one of `roots`.
absl::Status CheckModelRoots(const DesiredState& desired, const std::vector<std::string>& roots,
                             const std::string& file);

// All that a service with these model roots would say of the file: ReadDesiredFile, ToRegisterRequests and
// CheckModelRoots.
absl::Status CheckDesiredFile(FileSystem& files, const std::string& file, const std::vector<std::string>& roots);

}  // namespace weightbroker
