// Debian's Abseil has a string_view of its own; upstream's is std::string_view. These compile with both.
#pragma once

#include <string_view>

#include "absl/strings/string_view.h"

namespace weightbroker {

inline absl::string_view ToAbsl(std::string_view text) { return absl::string_view(text.data(), text.size()); }
inline std::string_view ToStd(absl::string_view text) { return std::string_view(text.data(), text.size()); }

}  // namespace weightbroker
