// Small things about strings. Debian's Abseil has a string_view of its own, upstream's is std::string_view: these
// compile with both. Thread-safe: all functions are pure.
#pragma once

#include <string>
#include <string_view>

#include "absl/strings/string_view.h"

namespace weightbroker {

inline absl::string_view ToAbsl(std::string_view text) { return absl::string_view(text.data(), text.size()); }
inline std::string_view ToStd(absl::string_view text) { return std::string_view(text.data(), text.size()); }

// "RESIDENT" for an enumerator's name "WEIGHT_SET_STATE_RESIDENT" and the prefix "WEIGHT_SET_STATE_".
inline std::string WithoutPrefix(std::string name, std::string_view prefix) {
  if (name.compare(0, prefix.size(), prefix) == 0) name.erase(0, prefix.size());
  return name;
}

}  // namespace weightbroker
