// Writes checkpoints that nobody trained: of any known architecture, of any size, right or with a well-known fault.
#pragma once

#include <cstdint>
#include <string>

#include "client/tool/output.h"
#include "common/synthetic/model.h"

namespace weightbroker::tool {

struct MakeCheckpointFlags {
  std::string folder;
  ModelRequest model{.model = "llama"};
  std::string fault;  // empty: none
  uint64_t seed = 1;
  bool sparse = false;
  bool json = false;
};

// Writes the files, and prints what they come to.
ExitCode RunMakeCheckpoint(const MakeCheckpointFlags& flags);

// Print the faults that there are, and for which reason each is refused; the models that there are.
ExitCode RunListFaults(bool json);
ExitCode RunListModels(bool json);

}  // namespace weightbroker::tool
