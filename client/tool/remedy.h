// What docs/errors.md says is to be done about an error: the program carries the page with it.
#pragma once

#include <string>

namespace weightbroker::tool {

// The last cell of the reason's row, without the marks of Markdown; empty for a reason that the page does not have.
// Thread-safe: a pure function.
std::string RemedyFor(const std::string& reason);

}  // namespace weightbroker::tool
