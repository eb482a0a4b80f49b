// What the machine does at best, each as a task of a fresh process (see task.h): reading the files and nothing else,
// copying them from the page cache, and making a memfd of as many bytes. What they give is {"seconds", "bytes"}.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/load/task.h"

namespace weightbroker::bench {

absl::StatusOr<nlohmann::ordered_json> ReadWithPread(const Task& task);
absl::StatusOr<nlohmann::ordered_json> ReadWithUring(const Task& task);  // UNIMPLEMENTED where there is no liburing
absl::StatusOr<nlohmann::ordered_json> CopyFromMapping(const Task& task);
absl::StatusOr<nlohmann::ordered_json> FillMapping(const Task& task);
absl::StatusOr<nlohmann::ordered_json> WriteMemfds(const Task& task);

// The ways to try, the best of which is the ceiling.
std::vector<Task> ReadMethods(const std::vector<std::string>& files, int64_t bytes, bool direct);
std::vector<Task> CopyMethods(const std::vector<std::string>& files, int64_t bytes);
std::vector<Task> FillMethods(int64_t bytes);

// Pieces of files that make up `bytes` from their start, or all of them if that is 0.
struct FileRun {
  int file = 0;  // into Task::files
  int64_t offset_bytes = 0;
  int64_t size_bytes = 0;
};
absl::StatusOr<std::vector<FileRun>> DivideFiles(const Task& task);

}  // namespace weightbroker::bench
