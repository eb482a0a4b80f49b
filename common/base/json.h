// Strict JSON, for files that nobody vouches for. On top of RFC 8259 it refuses what readers are known to disagree on:
// duplicate keys at any level, bytes after the value (NUL padding among them), comments, a byte-order mark, strings
// that are not valid UTF-8, lone surrogates, numbers that overflow, and nesting deeper than kMaxJsonDepth.
//
// Thread-safe: all functions are pure.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace weightbroker {

inline constexpr int kMaxJsonDepth = 64;

// Parses `text`. INVALID_ARGUMENT (no reason: the caller adds file and meaning) with position and cause otherwise.
absl::StatusOr<nlohmann::json> ParseStrictJson(std::string_view text);

// Parses `text` into `handler` without building a document, with the same strictness. `handler` is a
// nlohmann::json_sax<nlohmann::json>; it may stop the parse by returning false, and the result is then CANCELLED.
absl::Status ParseStrictJsonSax(std::string_view text, nlohmann::json_sax<nlohmann::json>& handler);

// Sorted keys, no white space, integers as integers, strings in UTF-8 with only the escapes that JSON requires. The
// same value always gives the same bytes. Floating-point values are not allowed in it (checked): they have no canonical
// text.
absl::StatusOr<std::string> CanonicalJson(const nlohmann::json& value);

}  // namespace weightbroker
