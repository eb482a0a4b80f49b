// The digests of many tensors in memory, by several threads.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "common/memory/digest.h"

namespace weightbroker {

// One for each of `tensors`, in their order; `threads` is at least 1. Thread-safe.
std::vector<Digest> DigestTensors(std::span<const std::span<const std::byte>> tensors, int threads);

}  // namespace weightbroker
