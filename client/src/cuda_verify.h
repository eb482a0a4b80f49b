// Compares tensors in GPU memory with the digests that their manifest states.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "common/device/cuda_context.h"
#include "weightbroker/tensor.h"

namespace weightbroker::client {

// Digests on the GPU, or on the host in a build without kernels, where every byte is copied there first.
// DIGEST_MISMATCH names the first tensor, by name, that differs; CUDA_ERROR. The calling thread's current context is
// left as it was. Thread-safe.
absl::Status VerifyOnGpu(const CudaContext& context, const std::vector<Tensor>& tensors);

// The second of these ways, which needs no kernels.
absl::Status VerifyByCopying(const CudaContext& context, const std::vector<Tensor>& tensors);

}  // namespace weightbroker::client
