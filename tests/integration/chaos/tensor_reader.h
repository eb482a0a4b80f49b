// A tensor's bytes for whoever compares them: where they are, or copied from its GPU.
//
//   TensorReader reader;
//   memcmp(right, reader.Read(weights, tensor), tensor.size_bytes);
#pragma once

#include <string>

#include "common/device/cuda_context.h"
#include "weightbroker/mapped_weights.h"

namespace weightbroker::testing {

// Keeps the GPU's context for as long as it lives, as an engine does. Not thread-safe.
class TensorReader {
 public:
  // Valid until the next call. Ends the process with kCannotRead, having said why, if the GPU refuses.
  const void* Read(const MappedWeights& weights, const Tensor& tensor);

 private:
  CudaContext context_;  // of the first GPU that was read: an engine of the chaos has one
  std::string copy_;
};

}  // namespace weightbroker::testing
