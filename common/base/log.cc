#include "common/base/log.h"

#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "common/base/log_format.h"
#include "common/base/log_sink.h"
#include "common/base/quote.h"

namespace weightbroker {
namespace {

constexpr char kFormatVariable[] = "WEIGHTBROKER_LOG_FORMAT";
constexpr char kTextName[] = "text";
constexpr char kJsonName[] = "json";

// A pipe takes so much as a whole or not at all, whoever else writes to it.
constexpr size_t kMaxLineBytes = PIPE_BUF;
// For the time stamp, and for what is said of fields that are left out and lines that were dropped.
constexpr size_t kReservedBytes = 128;
// Of a value as it is written, so that two long ones fit into a line.
constexpr size_t kMaxValueBytes = 1600;

std::atomic<LogLevel> g_level{LogLevel::kInfo};
// Of the environment until a program says otherwise.
std::atomic<bool>& IsJson() {
  static auto* const is_json = new std::atomic<bool>([] {
    const char* format = getenv(kFormatVariable);
    return format != nullptr && std::string_view(format) == kJsonName;
  }());
  return *is_json;
}

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

bool IsOwnKey(std::string_view key) {
  return key == "time" || key == "level" || key == "program" || key == "pid" || key == "event";
}

// As JSON has it. Bytes that are not UTF-8 are shown as they are in logfmt: JSON has no other way.
std::string JsonString(std::string_view value) {
  std::string out = "\"";
  while (!value.empty() && out.size() < kMaxValueBytes) {
    const auto c = static_cast<unsigned char>(value[0]);
    const size_t length = Utf8SequenceLength(value);
    char escaped[16];
    if (length == 0) {
      snprintf(escaped, sizeof(escaped), "\\\\x%02x", static_cast<unsigned>(c));
      out += escaped;
    } else if (c == '"' || c == '\\') {
      out += {'\\', static_cast<char>(c)};
    } else if (c < ' ' || c == 0x7F) {
      snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned>(c));
      out += escaped;
    } else {
      out.append(value.substr(0, length));
    }
    value.remove_prefix(length == 0 ? 1 : length);
  }
  if (!value.empty()) out += "... (" + std::to_string(value.size()) + " more bytes)";
  return out + "\"";
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

void SetLogFormat(LogFormat format) {
  const bool is_json = format == LogFormat::kJson;
  IsJson() = is_json;
  setenv(kFormatVariable, is_json ? kJsonName : kTextName, 1);
}

std::string FormatJsonLogLine(std::string_view time, LogLevel level, std::string_view event, const LogFields& fields) {
  std::string line = "{\"time\":" + JsonString(time) + ",\"level\":" + JsonString(LevelName(level)) +
                     ",\"program\":" + JsonString(ProgramName()) + ",\"pid\":" + std::to_string(getpid()) +
                     ",\"event\":" + JsonString(event);
  int left_out = 0;
  for (const auto& [key, value] : fields) {
    const std::string field = "," + JsonString(IsOwnKey(key) ? key + "_" : key) + ":" + JsonString(value);
    if (line.size() + field.size() > kMaxLineBytes - kReservedBytes) {
      ++left_out;
    } else {
      line += field;
    }
  }
  if (left_out > 0) line += ",\"fields_left_out\":\"" + std::to_string(left_out) + "\"";
  return line + "}";
}

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

namespace {

std::string FormatLine(LogLevel level, std::string_view event, const LogFields& fields, int64_t unreported) {
  std::string time = TimeStamp();
  if (!IsJson()) {
    std::string line = time + FormatLogLine(level, event, fields);
    if (unreported > 0) line += " dropped_lines=" + std::to_string(unreported);
    return line;
  }
  time.pop_back();  // the blank
  std::string line = FormatJsonLogLine(time, level, event, fields);
  if (unreported > 0) line.insert(line.size() - 1, ",\"dropped_lines\":\"" + std::to_string(unreported) + "\"");
  return line;
}

}  // namespace

void Log(LogLevel level, std::string_view event, const LogFields& fields) {
  if (level < g_level.load(std::memory_order_relaxed)) return;
  const int64_t unreported = g_unreported.exchange(0);
  std::string line = FormatLine(level, event, fields, unreported) + "\n";
  if (WriteLogLine(line)) return;
  ++g_dropped;
  g_unreported += unreported + 1;
}

int64_t DroppedLogLines() { return g_dropped; }

}  // namespace weightbroker
