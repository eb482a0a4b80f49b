// What the tool's flags may be, and what is said of a value that they may not be. CLI11's own validators name the ends
// of number types.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

namespace weightbroker::tool {

// A whole number of at least `least`.
CLI::Validator WholeNumberFrom(int64_t least);

// A time to wait, in seconds.
CLI::Validator Seconds();

// Text that a request can hold.
CLI::Validator Utf8();

// The beginning of a fingerprint, or all of it.
CLI::Validator FingerprintDigits();

// The same, or the word "none".
CLI::Validator FingerprintDigitsOrNone();

// NAME@TAG.
CLI::Validator AliasName();

}  // namespace weightbroker::tool
