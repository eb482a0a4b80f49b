// Puts what a file or a caller says into a message: it comes from somebody whom nobody vouches for, so it may be long,
// forge a line, or not be UTF-8 at all, which strict readers of protobuf refuse with all that is around it.
//
//   MakeError(Reason::kDeviceUnknown, absl::StrCat("device ", Quote(name), " is ..."), {{"device", Printable(name)}});
//
// Thread-safe: all functions are pure.
#pragma once

#include <string>
#include <string_view>

namespace weightbroker {

// `text` with control characters and bytes that are not UTF-8 as \xNN, cut to about 200 bytes with a count of the rest.
std::string Printable(std::string_view text);

// The same in double quotes, as tensor and module names stand in messages.
std::string Quote(std::string_view text);

// The same as Printable without the cut: for terminals, which obey control characters.
std::string OneLine(std::string_view text);

// `text` with bytes that are not UTF-8 as \xNN, and nothing else changed.
std::string ToUtf8(std::string_view text);

// The longest beginning of `text` that has at most `max_bytes` and does not end inside of a UTF-8 sequence.
std::string_view CutUtf8(std::string_view text, size_t max_bytes);

// The same, with "... (N more bytes)" behind it if there is more.
std::string CutUtf8WithCount(std::string_view text, size_t max_bytes);

// The length of the UTF-8 sequence that `text` starts with, or 0 if it starts with none. Overlong forms, surrogates and
// values past U+10FFFF are none.
size_t Utf8SequenceLength(std::string_view text);

}  // namespace weightbroker
