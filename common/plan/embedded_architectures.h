// The files of common/plan/architectures/, put into the program by cmake/EmbedArchitectures.cmake.
#pragma once

#include <span>

namespace weightbroker {

struct EmbeddedArchitecture {
  const char* label;
  const char* text;
};

std::span<const EmbeddedArchitecture> EmbeddedArchitectures();

}  // namespace weightbroker
