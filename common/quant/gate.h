// The quantization gate: which checkpoints' raw bytes are all of their meaning. Allowed are no quantization and
// block-wise FP8; everything else is refused by name, saying where the name was found. Unknown means refuse.
//
//   auto quantization = CheckQuantization(*checkpoint);
//   if (!quantization.ok()) return quantization.status();    // QUANTIZATION_UNSUPPORTED: method and place
//
// It takes no memory for weights. Thread-safe: all functions are pure.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"

namespace weightbroker {

// The only block that engines agree on.
inline constexpr std::array<int64_t, 2> kFp8BlockSize = {128, 128};

struct Quantization {
  std::string method = "none";                 // "none" or "fp8"
  std::array<int64_t, 2> block_size = {0, 0};  // rows, columns; {0, 0} for none
  std::vector<std::string> ignored_modules;    // sorted
};

// Judges config and side files alone (every place in which a method hides). QUANTIZATION_UNSUPPORTED names method and
// place; QUANTIZATION_MALFORMED for a declaration that cannot be read; QUANTIZATION_CONFLICT for two that disagree.
absl::StatusOr<Quantization> ReadQuantizationConfig(const nlohmann::json& config,
                                                    const std::map<std::string, nlohmann::json>& side_files);

// ReadQuantizationConfig, then the tensors against it (QUANTIZATION_CONTRADICTED names tensor, expected and found):
// each quantized weight is F8_E4M3 with a float scale grid of ceil(rows/block) x ceil(columns/block), each ignored one
// is not, FP8 tensors are not there without a config that says so, and every dtype can be served (DTYPE_UNSUPPORTED
// names tensor and dtype).
absl::StatusOr<Quantization> CheckQuantization(const Checkpoint& checkpoint);

}  // namespace weightbroker
