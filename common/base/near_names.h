// For messages about a name that is not known: which of those that are known look like it.
//
//   absl::StrJoin(NearNames("lama@live", known, 3), ", ")     // "llama@live, ..."
//
// Thread-safe: pure functions.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace weightbroker {

// How many characters must be added, removed or replaced to make one of the other.
size_t EditDistance(const std::string& a, const std::string& b);

// At most `most` of `known`, the nearest first; those that are as near in their order.
std::vector<std::string> NearNames(const std::string& name, std::vector<std::string> known, size_t most);

}  // namespace weightbroker
