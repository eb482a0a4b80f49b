// Model folders for measuring loads: shaped as a Llama, so that every plan of ours takes them, or of so many tensors of
// equal length. No holes, no constant stretches; written by several threads.
//
//   ASSIGN_OR_RETURN(const ModelFolder model, WriteModelFolder("/dev/shm/bench", {.bytes = int64_t{30} << 30}));
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace weightbroker::bench {

struct ModelRecipe {
  int64_t bytes = int64_t{2} << 30;  // about so many
  int64_t tensors = 0;               // of equal length; 0: a Llama's
  int64_t files = 0;                 // 0: as many as keep each under 5 GB, and at least 2
};

struct ModelFolder {
  std::string path;
  std::vector<std::string> files;  // the shards' paths, sorted
  int64_t total_bytes = 0;         // of all tensors
  int64_t tensor_count = 0;
};

// Writes it into `path`, which is made if need be, unless what is there already was made from the same recipe; what was
// made from another is removed, and a folder with anything else in it is refused.
absl::StatusOr<ModelFolder> WriteModelFolder(const std::string& path, const ModelRecipe& recipe);

}  // namespace weightbroker::bench
