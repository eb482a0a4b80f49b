#include "common/base/log.h"

#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <ctime>

namespace weightbroker {
namespace {

std::atomic<LogLevel> g_level{LogLevel::kInfo};

std::string& ProgramName() {
  static std::string* const name = new std::string("weightbroker");
  return *name;
}

const char* LevelName(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
  }
  return "unknown";
}

bool NeedsQuotes(std::string_view value) {
  if (value.empty()) return true;
  for (const char c : value) {
    if (static_cast<unsigned char>(c) <= ' ' || c == '"' || c == '=' || c == '\\' || c == 0x7F) return true;
  }
  return false;
}

void AppendValue(std::string_view value, std::string* out) {
  if (!NeedsQuotes(value)) {
    out->append(value);
    return;
  }
  out->push_back('"');
  for (const char c : value) {
    if (c == '"' || c == '\\') {
      out->push_back('\\');
      out->push_back(c);
    } else if (c == '\n') {
      out->append("\\n");
    } else if (static_cast<unsigned char>(c) < ' ' || c == 0x7F) {
      char escaped[8];
      snprintf(escaped, sizeof(escaped), "\\x%02x", static_cast<unsigned char>(c));
      out->append(escaped);
    } else {
      out->push_back(c);
    }
  }
  out->push_back('"');
}

std::string TimeStamp() {
  timeval now{};
  gettimeofday(&now, nullptr);
  tm parts{};
  gmtime_r(&now.tv_sec, &parts);
  char text[32];
  const size_t length = strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S", &parts);
  char fraction[16];
  snprintf(fraction, sizeof(fraction), ".%03dZ ", static_cast<int>(now.tv_usec / 1000));
  return std::string(text, length) + fraction;
}

}  // namespace

void SetLogProgram(const std::string& program) { ProgramName() = program; }

void SetLogLevel(LogLevel level) { g_level = level; }

std::string FormatLogLine(LogLevel level, std::string_view event, const LogFields& fields) {
  std::string line = "level=";
  line += LevelName(level);
  line += " program=" + ProgramName() + " pid=" + std::to_string(getpid()) + " event=";
  AppendValue(event, &line);
  for (const auto& [key, value] : fields) {
    line += " " + key + "=";
    AppendValue(value, &line);
  }
  return line;
}

void Log(LogLevel level, std::string_view event, const LogFields& fields) {
  if (level < g_level.load(std::memory_order_relaxed)) return;
  const std::string line = TimeStamp() + FormatLogLine(level, event, fields) + "\n";
  // One write keeps lines of several processes whole; nothing useful can be done if stderr is gone.
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace weightbroker
