// Cuts a shard's plan into reads: runs of a file that are large enough to be fast and small enough for a ring of
// buffers.
//
//   for (const ReadItem& item : PlanReads(plan, chunk_bytes)) ...      // any order, any thread
//
// Thread-safe: all functions are pure.
#pragma once

#include <cstdint>
#include <vector>

#include "common/plan/plan.h"

namespace weightbroker {

// A run of one tensor's bytes.
struct ReadSegment {
  int32_t tensor = 0;               // into ShardPlan::tensors
  int64_t tensor_offset_bytes = 0;  // a multiple of kDigestWordBytes, so that each run can be digested by itself
  int64_t file_offset_bytes = 0;
  int64_t size_bytes = 0;  // > 0
};

// A run of one file without a gap, read at once.
struct ReadItem {
  int32_t file_index = 0;
  int64_t begin_bytes = 0;
  int64_t end_bytes = 0;
  std::vector<ReadSegment> segments;  // in file order; together they are [begin_bytes, end_bytes)
};

// Every byte of every tensor that is read is in exactly one segment. With its ends rounded out to kDirectAlignmentBytes
// no item is longer than `chunk_bytes`, which is a multiple of that and at least twice it. Items come in file order.
// Where a tensor lies at an offset that is no multiple of 8, neighbours share a block of the file, which is then read
// twice.
std::vector<ReadItem> PlanReads(const ShardPlan& plan, int64_t chunk_bytes);

}  // namespace weightbroker
