// One service for each GPU: its socket carries the GPU's UUID in its name, so that whoever wants that GPU's weights
// finds it without asking.
//
//   ASSIGN_OR_RETURN(socket, ExpandGpuUuid("/run/weightbroker/{gpu_uuid}.sock", {"GPU-6f1c..."}));
//
// It opens no library, because weightbrokerd is to stay small: what a number stands for is read from the driver's files
// under /proc. Thread-safe.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace weightbroker {

// `text` with each "{gpu_uuid}" in it replaced by the UUID of the only one of `devices`, which are as --devices has
// them; as it is without any. INVALID_ARGUMENT, without the flag's name, if there is more than one device, or none is a
// GPU, or a number is given and the driver does not say which GPU that is. `proc` stands for /proc, for tests.
absl::StatusOr<std::string> ExpandGpuUuid(const std::string& text, const std::vector<std::string>& devices,
                                          const std::string& proc = "/proc");

}  // namespace weightbroker
