// The layout "engine": an engine's own tensor names, fusion and order, published by that engine. Thread-safe: all
// functions are pure.
#pragma once

#include "absl/status/status.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker {

inline constexpr char kEngineLayout[] = "engine";  // in spec.layout

inline bool IsEngineLayout(const v1::WeightSpec& spec) { return spec.layout() == kEngineLayout; }

// INVALID_ARGUMENT unless engine and engine_version are there with this layout, in short printable ASCII, and absent
// with any other.
absl::Status CheckEngineFields(const v1::WeightSpec& spec);

// INVALID_ARGUMENT unless the spec's quantization is one short word: which ones an engine may publish is for the
// service to say.
absl::Status CheckEngineQuantization(const v1::WeightSpec& spec);

}  // namespace weightbroker
