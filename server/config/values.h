// Turns the text of a flag into a value. Each gives the reason, without the flag's name, as an INVALID_ARGUMENT: the
// caller knows where the text came from.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "common/base/log.h"
#include "common/base/log_format.h"
#include "common/memory/memory_limit.h"

namespace weightbroker {

// A decimal number from `least` to `greatest`.
absl::StatusOr<int64_t> ParseNumber(const std::string& text, int64_t least, int64_t greatest);

// Bytes: "1024", "64KiB", "512MiB", "80GiB", "2TiB".
absl::StatusOr<int64_t> ParseByteCount(const std::string& text);

// The same, or a part of all that there is: "80%".
absl::StatusOr<MemoryLimit> ParseMemoryLimit(const std::string& text);

// "idle" or "refuse": whether memory that nobody uses is taken from other weight sets.
absl::StatusOr<bool> ParseEviction(const std::string& text);

// A time: "500ms", "5s", "2m".
absl::StatusOr<std::chrono::milliseconds> ParseDuration(const std::string& text);
// The same, and more than none.
absl::StatusOr<std::chrono::milliseconds> ParsePositiveDuration(const std::string& text);

// A GPU by its UUID ("GPU-" and the rest) or its number, "all" or "host". Whether it is there is not checked.
absl::StatusOr<std::string> ParseDevice(const std::string& text);

// Permissions in octal, "660" or "0660", at most 0777.
absl::StatusOr<mode_t> ParseMode(const std::string& text);

// A user or group by number, or by a name that this system knows.
absl::StatusOr<uid_t> ParseUser(const std::string& text);
absl::StatusOr<gid_t> ParseGroup(const std::string& text);

// "debug", "info", "warning" or "error".
absl::StatusOr<LogLevel> ParseLogLevel(const std::string& text);
absl::StatusOr<LogFormat> ParseLogFormat(const std::string& text);

// "127.0.0.1:PORT" to its port, empty to nullopt. No other address: metrics have no access control of their own.
absl::StatusOr<std::optional<int>> ParseMetricsAddress(const std::string& text);

// The length of one read of a checkpoint, in bytes; 0 leaves it to the loader.
absl::StatusOr<int64_t> ParseReadChunk(const std::string& text);

// "io_uring", "pread", or empty for "auto".
absl::StatusOr<std::string> ParseReadMethod(const std::string& text);

// "allow" or "refuse".
absl::StatusOr<bool> ParsePermission(const std::string& text);

// "name=/path" to both, the path with symbolic links resolved. The name is what stands before the colon in a spec.
absl::StatusOr<std::pair<std::string, std::string>> ParseModelRoot(const std::string& text);

struct EngineMethod {
  std::string engine;
  std::string version;
  std::string method;
};
// "engine/version/method". Versions and methods have no slash; an engine's name may.
absl::StatusOr<EngineMethod> ParseEngineMethod(const std::string& text);

// Ok if `path` is a folder that can be listed.
absl::Status CheckFolder(const std::string& path);

// Ok if `path` is a program that this process may start.
absl::Status CheckProgram(const std::string& path);

}  // namespace weightbroker
