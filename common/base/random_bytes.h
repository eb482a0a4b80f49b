// Bytes that nobody can guess, for capabilities. Thread-safe.
#pragma once

#include <cstddef>
#include <string>

namespace weightbroker {

// `count` (at most 256) of them. Ends the process if the kernel has none to give: guessable ones are no alternative.
std::string RandomBytes(size_t count);

}  // namespace weightbroker
