// The man page and the completion for bash, made from what the command line itself says of its commands and flags, so
// that they cannot be of another version.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace weightbroker::tool {

// In man(7)'s macros.
std::string ManPage(const CLI::App& app, const std::string& version);

// To be sourced.
std::string BashCompletion(const CLI::App& app);

}  // namespace weightbroker::tool
