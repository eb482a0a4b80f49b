// The state of the page cache before each sample: proven, not hoped for.
//
//   RETURN_IF_ERROR(PreparePageCache(CacheState::kCold, files));
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace weightbroker::bench {

enum class CacheState {
  kCold,    // not a page of the files is there
  kWarm,    // all of them are
  kMemory,  // the files are in a file system that has no storage (tmpfs): there is no other state
};

const char* NameOf(CacheState state);

// FAILED_PRECONDITION if mincore says that it is not so afterwards.
absl::Status PreparePageCache(CacheState state, const std::vector<std::string>& files);

// Whether the folder's file system has no storage.
bool IsInMemory(const std::string& folder);

}  // namespace weightbroker::bench
