// One line per event on stderr, in logfmt: what a person can read and a log shipper can parse.
//
//   Log(LogLevel::kInfo, "load.finished", {{"fingerprint", fp}, {"bytes", absl::StrCat(n)}});
//   -> 2026-11-29T17:11:36.123Z level=info program=broker pid=42 event=load.finished fingerprint=0a1b bytes=90868376
//
// Values with spaces, quotes, control characters or bytes that are not UTF-8 are quoted and escaped, so that a hostile
// file name cannot forge a line. Never give it a ticket or a handle: they are capabilities.
//
// A line is one write, and never longer than what the kernel writes to a pipe as a whole (4,096 bytes): values are cut,
// with a count of the rest. Where stderr is a pipe or a socket Log never waits for whoever reads it: a line for which
// there is no room is dropped, and the next one that goes through says how many were (`dropped_lines`). To a file or a
// terminal every line is written, however long that takes. Thread-safe.
#pragma once

#include <cstdint>
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

// How many lines this process has dropped.
int64_t DroppedLogLines();

// The line that Log would write, without the time stamp and the newline; for tests.
std::string FormatLogLine(LogLevel level, std::string_view event, const LogFields& fields);

}  // namespace weightbroker
