// Which bytes of a checkpoint's tensor a set of pieces needs to have read. Thread-safe: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/checkpoint/checkpoint.h"
#include "common/plan/plan.h"

namespace weightbroker {

struct ByteRange {
  int64_t begin_bytes = 0;  // from the tensor's start
  int64_t end_bytes = 0;
};

struct PieceUse {
  const Piece* piece = nullptr;
  Transform transform = Transform::kCopy;
};

// Bytes that nobody wants are read with their neighbours where fewer than this many lie between two that somebody does:
// a disk reads through them faster than it starts again.
inline constexpr int64_t kReadThroughBytes = 64 << 10;

// The ranges, in order, without overlap. Rows that are quantized are wanted whole.
std::vector<ByteRange> WantedBytes(const CheckpointTensor& tensor, std::span<const PieceUse> uses);

}  // namespace weightbroker
