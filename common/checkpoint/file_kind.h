// Tells what a file is that is not what it should be, so that the error can say what to do.
#pragma once

#include <string>
#include <string_view>

namespace weightbroker {

// For a file whose first bytes are `head` and that is no safetensors file: one clause that says what it is and what to
// do, e.g. "is a Git LFS pointer, not the file itself; run \"git lfs pull\"". Empty if nothing is recognized.
std::string DescribeForeignFile(std::string_view head);

// How many bytes of a file DescribeForeignFile wants to see.
inline constexpr int kForeignFileHeadBytes = 512;

}  // namespace weightbroker
