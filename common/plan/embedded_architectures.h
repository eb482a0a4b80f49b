// The files of common/plan/architectures/, which the program carries with it.
#pragma once

#include <span>

#include "common/base/embedded_file.h"

namespace weightbroker {

std::span<const EmbeddedFile> EmbeddedArchitectures();

}  // namespace weightbroker
