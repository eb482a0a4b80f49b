// What an engine on torch does beside mapping: in a file of its own, because torch's headers and protobuf's do not go
// together. torch_step.cc does it, no_torch_step.cc does nothing.
#pragma once

#include "weightbroker/mapped_weights.h"
#include "weightbroker/status.h"

namespace weightbroker::bench {

// Has torch initialize itself on the first GPU, as it is by the time an engine wants its weights.
void StartTorch();

// Makes every tensor a torch::Tensor, and keeps them.
Status BindToTorch(const MappedWeights& weights);

}  // namespace weightbroker::bench
