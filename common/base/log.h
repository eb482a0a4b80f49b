// One line per event on stderr, in logfmt: what a person can read and a log shipper can parse.
//
//   Log(LogLevel::kInfo, "load.finished", {{"fingerprint", fp}, {"bytes", absl::StrCat(n)}});
//   -> 2026-11-29T17:11:36.123Z level=info program=broker pid=42 event=load.finished fingerprint=0a1b bytes=90868376
//
// Values with spaces, quotes or control characters are quoted and escaped, so that a hostile file name cannot forge a
// line. Never give it a ticket or a handle: they are capabilities. Thread-safe; a line is one write.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace weightbroker {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

using LogFields = std::vector<std::pair<std::string, std::string>>;

// Sets what this process calls itself in every line, and the lowest level that is written (info by default).
void SetLogProgram(const std::string& program);
void SetLogLevel(LogLevel level);

// Writes one line. `event` is a dotted lower-case name, the same for every occurrence.
void Log(LogLevel level, std::string_view event, const LogFields& fields = {});

// The line that Log would write, without the time stamp and the newline; for tests.
std::string FormatLogLine(LogLevel level, std::string_view event, const LogFields& fields);

}  // namespace weightbroker
