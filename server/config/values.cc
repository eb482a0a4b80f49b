#include "server/config/values.h"

#include <grp.h>
#include <limits.h>
#include <pwd.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"

namespace weightbroker {
namespace {

absl::Status Bad(const std::string& why) { return absl::InvalidArgumentError(why); }

bool IsDecimal(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

}  // namespace

absl::StatusOr<int64_t> ParseNumber(const std::string& text, int64_t least, int64_t greatest) {
  int64_t value = 0;
  if (!IsDecimal(text) || !absl::SimpleAtoi(ToAbsl(text), &value) || value < least || value > greatest) {
    return Bad(absl::StrCat("\"", text, "\" is not a number from ", least, " to ", greatest));
  }
  return value;
}

absl::StatusOr<int64_t> ParseByteCount(const std::string& text) {
  const size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  const std::string suffix = text.substr(digits);
  constexpr std::pair<const char*, int> kShifts[] = {{"", 0}, {"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}};
  for (const auto& [unit, shift] : kShifts) {
    if (suffix != unit) continue;
    const auto number = ParseNumber(text.substr(0, digits), 0, std::numeric_limits<int64_t>::max() >> shift);
    if (number.ok()) return *number << shift;
  }
  return Bad(
      absl::StrCat("\"", text, "\" is not a number of bytes: give a whole number, alone or with KiB, MiB, GiB or TiB"));
}

absl::StatusOr<MemoryLimit> ParseMemoryLimit(const std::string& text) {
  if (text.empty() || text.back() != '%') {
    const auto bytes = ParseByteCount(text);
    if (bytes.ok()) return MemoryLimit{.bytes = *bytes};
    return Bad(absl::StrCat(std::string(bytes.status().message()), ", or a percentage from 1% to 100%"));
  }
  const auto percent = ParseNumber(text.substr(0, text.size() - 1), 1, 100);
  if (!percent.ok()) return Bad(absl::StrCat("\"", text, "\" is not a percentage from 1% to 100%"));
  return MemoryLimit{.percent = static_cast<int>(*percent)};
}

absl::StatusOr<bool> ParseEviction(const std::string& text) {
  if (text == "idle") return true;
  if (text == "refuse") return false;
  return Bad(absl::StrCat("\"", text, "\" is not a policy: give refuse or idle"));
}

absl::StatusOr<std::chrono::milliseconds> ParseDuration(const std::string& text) {
  constexpr int64_t kMostMilliseconds = 365LL * 24 * 3600 * 1000;
  const size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  const std::string suffix = text.substr(digits);
  constexpr std::pair<const char*, int64_t> kFactors[] = {{"ms", 1}, {"s", 1'000}, {"m", 60'000}};
  for (const auto& [unit, factor] : kFactors) {
    if (suffix != unit) continue;
    const auto number = ParseNumber(text.substr(0, digits), 0, kMostMilliseconds / factor);
    if (number.ok()) return std::chrono::milliseconds(*number * factor);
  }
  return Bad(absl::StrCat("\"", text, "\" is not a time: give a whole number with ms, s or m, for instance 500ms"));
}

absl::StatusOr<std::chrono::milliseconds> ParsePositiveDuration(const std::string& text) {
  ASSIGN_OR_RETURN(const std::chrono::milliseconds time, ParseDuration(text));
  if (time.count() == 0) return Bad(absl::StrCat("\"", text, "\" is no time at all: give more"));
  return time;
}

absl::StatusOr<mode_t> ParseMode(const std::string& text) {
  char* end = nullptr;
  const unsigned long value = strtoul(text.c_str(), &end, 8);
  if (text.empty() || text.find_first_not_of("01234567") != std::string::npos || value > 0777) {
    return Bad(absl::StrCat("\"", text, "\" is not a mode: give three octal digits, for instance 0660"));
  }
  return static_cast<mode_t>(value);
}

absl::StatusOr<uid_t> ParseUser(const std::string& text) {
  if (IsDecimal(text)) {
    ASSIGN_OR_RETURN(const int64_t number, ParseNumber(text, 0, std::numeric_limits<uid_t>::max() - 1));
    return static_cast<uid_t>(number);
  }
  const passwd* const user = getpwnam(text.c_str());
  if (user == nullptr) return Bad(absl::StrCat("there is no user \"", text, "\" on this system"));
  return user->pw_uid;
}

absl::StatusOr<gid_t> ParseGroup(const std::string& text) {
  if (IsDecimal(text)) {
    ASSIGN_OR_RETURN(const int64_t number, ParseNumber(text, 0, std::numeric_limits<gid_t>::max() - 1));
    return static_cast<gid_t>(number);
  }
  const group* const found = getgrnam(text.c_str());
  if (found == nullptr) return Bad(absl::StrCat("there is no group \"", text, "\" on this system"));
  return found->gr_gid;
}

absl::StatusOr<std::string> ParseDevice(const std::string& text) {
  constexpr size_t kUuidLength = 40;  // "GPU-" and 8-4-4-4-12 digits
  const bool is_uuid = text.size() == kUuidLength && text.rfind("GPU-", 0) == 0 &&
                       text.find_first_not_of("0123456789abcdef-", 4) == std::string::npos;
  if (is_uuid || text == "all" || text == "host" || (IsDecimal(text) && text.size() <= 4)) return text;
  return Bad(
      absl::StrCat("\"", text, "\" is no GPU: give its UUID as nvidia-smi -L shows it, its number, all or host"));
}

absl::StatusOr<LogLevel> ParseLogLevel(const std::string& text) {
  if (text == "debug") return LogLevel::kDebug;
  if (text == "info") return LogLevel::kInfo;
  if (text == "warning") return LogLevel::kWarning;
  if (text == "error") return LogLevel::kError;
  return Bad(absl::StrCat("\"", text, "\" is not a log level: give debug, info, warning or error"));
}

absl::StatusOr<LogFormat> ParseLogFormat(const std::string& text) {
  if (text == "text") return LogFormat::kText;
  if (text == "json") return LogFormat::kJson;
  return Bad(absl::StrCat("\"", text, "\" is not a form of the log: give text or json"));
}

absl::StatusOr<int64_t> ParseReadChunk(const std::string& text) {
  constexpr int64_t kUnit = 4096;
  const auto bytes = ParseByteCount(text);
  if (bytes.ok() && (*bytes == 0 || (*bytes % kUnit == 0 && *bytes >= 2 * kUnit && *bytes <= 256 << 20))) return bytes;
  return Bad(
      absl::StrCat("\"", text, "\" is not the length of a read: give a multiple of 4KiB from 8KiB to 256MiB, or 0"));
}

absl::StatusOr<std::string> ParseReadMethod(const std::string& text) {
  if (text == "auto") return std::string();
  if (text == "io_uring" || text == "pread") return text;
  return Bad(absl::StrCat("\"", text, "\" is no way to read: give auto, io_uring or pread"));
}

absl::StatusOr<bool> ParsePermission(const std::string& text) {
  if (text == "allow") return true;
  if (text == "refuse") return false;
  return Bad(absl::StrCat("\"", text, "\" is not a policy: give refuse or allow"));
}

absl::StatusOr<std::optional<int>> ParseMetricsAddress(const std::string& text) {
  constexpr std::string_view kHost = "127.0.0.1:";
  if (text.empty()) return std::optional<int>();
  if (text.rfind(kHost, 0) == 0) {
    const auto port = ParseNumber(text.substr(kHost.size()), 0, 65535);
    if (port.ok()) return std::optional<int>(static_cast<int>(*port));
  }
  return Bad(absl::StrCat("\"", text, "\" is not 127.0.0.1:PORT: metrics are served on loopback only"));
}

absl::StatusOr<std::pair<std::string, std::string>> ParseModelRoot(const std::string& text) {
  constexpr char kNameCharacters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-";
  const size_t equals = text.find('=');
  const std::string name = text.substr(0, equals);
  if (equals == std::string::npos || name.empty() || name.find_first_not_of(kNameCharacters) != std::string::npos) {
    return Bad(
        absl::StrCat("\"", text, "\" is not NAME=/PATH, with a name of letters, digits, \"_\", \".\" and \"-\""));
  }
  const std::string path = text.substr(equals + 1);
  if (path.empty() || path[0] != '/') return Bad(absl::StrCat("\"", path, "\" is not an absolute path"));
  char resolved[PATH_MAX];
  struct stat stat_buffer {};
  if (realpath(path.c_str(), resolved) == nullptr || stat(resolved, &stat_buffer) != 0) {
    return Bad(absl::StrCat("the folder ", path, " cannot be used: ", strerror(errno)));
  }
  if (!S_ISDIR(stat_buffer.st_mode)) return Bad(absl::StrCat(path, " is not a folder"));
  return std::pair(name, std::string(resolved));
}

absl::StatusOr<EngineMethod> ParseEngineMethod(const std::string& text) {
  const size_t second = text.rfind('/');
  const size_t first = second == std::string::npos || second == 0 ? std::string::npos : text.rfind('/', second - 1);
  EngineMethod parsed;
  if (first != std::string::npos) {
    parsed = {text.substr(0, first), text.substr(first + 1, second - first - 1), text.substr(second + 1)};
  }
  if (!parsed.engine.empty() && !parsed.version.empty() && !parsed.method.empty()) return parsed;
  return Bad(absl::StrCat("\"", text, "\" is not ENGINE/VERSION/METHOD"));
}

absl::Status CheckFolder(const std::string& path) {
  struct stat stat_buffer {};
  if (stat(path.c_str(), &stat_buffer) != 0 || !S_ISDIR(stat_buffer.st_mode) ||
      access(path.c_str(), R_OK | X_OK) != 0) {
    return Bad(absl::StrCat("\"", path, "\" is not a folder that can be listed"));
  }
  return absl::OkStatus();
}

absl::Status CheckProgram(const std::string& path) {
  struct stat stat_buffer {};
  if (stat(path.c_str(), &stat_buffer) != 0 || access(path.c_str(), X_OK) != 0) {
    return Bad(absl::StrCat("the program ", path, " cannot be started: ", strerror(errno)));
  }
  if (!S_ISREG(stat_buffer.st_mode)) return Bad(absl::StrCat(path, " is not a program"));
  return absl::OkStatus();
}

}  // namespace weightbroker
