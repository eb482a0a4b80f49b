// What an alias may be called: NAME@TAG, as "llama@live".
//
//   if (!IsAliasName(text)) return ...                        // a model, or a fingerprint
//   RETURN_IF_ERROR(CheckAliasName(request.alias()));          // INVALID_ARGUMENT
//
// Thread-safe: pure functions.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace weightbroker {

inline constexpr size_t kMaxAliasNameBytes = 128;

// Letters, digits, "_", "." and "-" on both sides of one "@", at most kMaxAliasNameBytes in all. No model and no
// fingerprint is such a name.
bool IsAliasName(const std::string& text);

// INVALID_ARGUMENT with what was found, unless it is one.
absl::Status CheckAliasName(const std::string& text);

}  // namespace weightbroker
