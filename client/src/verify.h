// Compares tensors in host memory with the digests that their manifest states.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "common/memory/digest.h"
#include "weightbroker/tensor.h"

namespace weightbroker::client {

// Reads every byte with `threads` (> 0) threads; large tensors are split among them. DIGEST_MISMATCH names the first
// tensor, by name, that differs. Thread-safe.
absl::Status VerifyDigests(const std::vector<Tensor>& tensors, int threads);

// DIGEST_MISMATCH naming the tensor and both digests, unless `found` is the one that its manifest states.
absl::Status CheckDigest(const Tensor& tensor, const Digest& found);

}  // namespace weightbroker::client
