// A model whose every word says which version it is of, so that a mixture of two cannot be overlooked.
#pragma once

#include <cstdint>
#include <string>

namespace weightbroker::testing {

// Writes `tensor_count` tensors of `tensor_bytes` each into `folder`, in one file. Every 64-bit word is `version`.
void WriteStampedModel(const std::string& folder, uint64_t version, int tensor_count, int64_t tensor_bytes);

}  // namespace weightbroker::testing
