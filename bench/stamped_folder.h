// Folders that a benchmark fills once and finds again in its next run.
//
//   RETURN_IF_ERROR(FillFolderOnce(folder, R"({"bytes":4096})", [&] { return WriteCheckpoint(draft, folder, {}); }));
#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"

namespace weightbroker::bench {

// Has `write` fill the folder, unless it was filled for the same `stamp`; what was filled for another is removed
// before. The stamp is written last, so that a half-written folder has none. Fails as `write` does; SYSTEM_ERROR if the
// stamp cannot be written.
absl::Status FillFolderOnce(const std::string& folder, const std::string& stamp,
                            const std::function<absl::Status()>& write);

}  // namespace weightbroker::bench
