#include "common/base/log.h"

#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdio>
#include <ctime>

#include "common/base/log_sink.h"
#include "common/base/quote.h"

namespace weightbroker {
namespace {

// A pipe takes so much as a whole or not at all, whoever else writes to it.
constexpr size_t kMaxLineBytes = PIPE_BUF;
// For the time stamp, and for what is said of fields that are left out and lines that were dropped.
constexpr size_t kReservedBytes = 128;
// Of a value as it is written, so that two long ones fit into a line.
constexpr size_t kMaxValueBytes = 1600;

std::atomic<LogLevel> g_level{LogLevel::kInfo};
std::atomic<int64_t> g_dropped{0};
std::atomic<int64_t> g_unreported{0};  // of those dropped

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
  while (!value.empty()) {
    const auto c = static_cast<unsigned char>(value[0]);
    const size_t length = Utf8SequenceLength(value);
    if (length == 0 || c <= ' ' || c == '"' || c == '=' || c == '\\' || c == 0x7F) return true;
    value.remove_prefix(length);
  }
  return false;
}

// The first character of `value` as it stands between quotes.
std::string Escape(std::string_view value, size_t length) {
  const char c = value[0];
  if (c == '"' || c == '\\') return {'\\', c};
  if (c == '\n') return "\\n";
  if (length > 0 && static_cast<unsigned char>(c) >= ' ' && c != 0x7F) return std::string(value.substr(0, length));
  char escaped[8];
  snprintf(escaped, sizeof(escaped), "\\x%02x", static_cast<unsigned>(static_cast<unsigned char>(c)));
  return escaped;
}

void AppendValue(std::string_view value, std::string* out) {
  if (!NeedsQuotes(value) && value.size() <= kMaxValueBytes) {
    out->append(value);
    return;
  }
  const size_t begin = out->size();
  out->push_back('"');
  while (!value.empty() && out->size() - begin < kMaxValueBytes) {
    const size_t length = Utf8SequenceLength(value);
    out->append(Escape(value, length));
    value.remove_prefix(length == 0 ? 1 : length);
  }
  if (!value.empty()) out->append("... (" + std::to_string(value.size()) + " more bytes)");
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
  int left_out = 0;
  for (const auto& [key, value] : fields) {
    std::string field = " " + key + "=";
    AppendValue(value, &field);
    if (line.size() + field.size() > kMaxLineBytes - kReservedBytes) {
      ++left_out;
    } else {
      line += field;
    }
  }
  if (left_out > 0) line += " fields_left_out=" + std::to_string(left_out);
  return line;
}

void Log(LogLevel level, std::string_view event, const LogFields& fields) {
  if (level < g_level.load(std::memory_order_relaxed)) return;
  std::string line = TimeStamp() + FormatLogLine(level, event, fields);
  const int64_t unreported = g_unreported.exchange(0);
  if (unreported > 0) line += " dropped_lines=" + std::to_string(unreported);
  line += "\n";
  if (WriteLogLine(line)) return;
  ++g_dropped;
  g_unreported += unreported + 1;
}

int64_t DroppedLogLines() { return g_dropped; }

}  // namespace weightbroker
