// Reads an architecture file. Thread-safe: pure functions.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "common/plan/architecture_rules.h"

namespace weightbroker {

// ARCHITECTURE_INVALID naming the file, the key, what was found and what is allowed.
absl::StatusOr<Architecture> ParseArchitecture(const std::string& label, const std::string& text);

}  // namespace weightbroker
