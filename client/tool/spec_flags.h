// The flags that say which weights are meant, for every subcommand that takes a spec.
#pragma once

#include <CLI/CLI.hpp>

#include "weightbroker/v1/types.pb.h"

namespace weightbroker::tool {

// They write to `spec`, which outlives the command, but for its model.
void AddSpecFlags(CLI::App* command, v1::WeightSpec* spec);

}  // namespace weightbroker::tool
