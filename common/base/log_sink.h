// Where log lines go: stderr, without ever waiting for whoever reads a pipe or a socket there. A process that waited
// would hang as soon as its reader does, and take with it everybody who waits for that process.
#pragma once

#include <string_view>

namespace weightbroker {

// Writes a line of at most PIPE_BUF bytes to stderr, as a whole or not at all: false if it is a pipe or a socket that
// has no room, or cannot be written. Thread-safe.
bool WriteLogLine(std::string_view line);

}  // namespace weightbroker
