// Puts what a file says into a message: names come from files that nobody vouches for, so they may be long, forge a
// line, or not be UTF-8 at all. Thread-safe: all functions are pure.
#pragma once

#include <string>
#include <string_view>

namespace weightbroker {

// `text` with control characters and bytes that are not UTF-8 as \xNN, cut to about 200 bytes with a count of the rest.
std::string Printable(std::string_view text);

// The same in double quotes, as tensor and module names stand in messages.
std::string Quote(std::string_view text);

}  // namespace weightbroker
