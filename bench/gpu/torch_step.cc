#include "bench/gpu/torch_step.h"

#include <ATen/ATen.h>

#include <utility>
#include <vector>

#include "weightbroker/torch.h"

namespace weightbroker::bench {

void StartTorch() { at::zeros({1}, at::TensorOptions(at::kCUDA)).item<float>(); }

Status BindToTorch(const MappedWeights& weights) {
  static auto* const kept = new std::vector<at::Tensor>;  // until the process ends
  auto tensors = ToTorch(weights);
  if (!tensors.ok()) return tensors.status();
  *kept = *std::move(tensors);
  return Status();
}

}  // namespace weightbroker::bench
