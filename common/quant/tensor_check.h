// The second half of the gate: whether the tensors are what the config says. Thread-safe: pure functions.
#pragma once

#include "absl/status/status.h"
#include "common/checkpoint/checkpoint.h"
#include "common/quant/gate.h"

namespace weightbroker {

// DTYPE_UNSUPPORTED for a tensor whose type cannot be served; QUANTIZATION_CONTRADICTED naming tensor, expected and
// found where config and tensors disagree.
absl::Status CheckTensors(const Checkpoint& checkpoint, const Quantization& quantization);

// Whether a tensor of this type can be served at all; the first half of CheckTensors.
absl::Status CheckDtype(const std::string& file, const std::string& tensor, const DtypeInfo& dtype);

}  // namespace weightbroker
