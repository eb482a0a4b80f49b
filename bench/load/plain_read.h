// The arm that does the least: read() of each file into memory of its own, one after the other. And the reference that
// all arms are compared with: the digest of every tensor in the files.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "bench/load/task.h"

namespace weightbroker::bench {

// {"load_seconds", "exec_seconds", "bytes", and Usage's}; with Task::digests those are written there, from the bytes
// where they are, after the time has been taken.
absl::StatusOr<nlohmann::ordered_json> PlainRead(const Task& task);

using DigestsByName = std::map<std::string, std::string>;  // hexadecimal
absl::StatusOr<DigestsByName> ReadDigestsFile(const std::string& path);

// As they should be, read by several threads.
absl::StatusOr<DigestsByName> ReferenceDigests(const std::string& folder);

}  // namespace weightbroker::bench
