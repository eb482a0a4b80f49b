// Cuts a node's plan into reads: runs of a file that are large enough to be fast and small enough for a ring of
// buffers.
//
//   const ReadPlan reads(checkpoint, plan, chunk_bytes);
//   for (const ReadItem& item : reads.items()) {              // any order, any thread
//     ... read [item.begin_bytes, item.end_bytes) ...
//     for (size_t shard = 0; shard < plan.shards.size(); ++shard) Store(reads.TransfersOf(item, shard));
//   }
//
// Thread-safe once built.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "common/load/destination.h"
#include "common/plan/plan.h"
#include "common/plan/source_ranges.h"

namespace weightbroker {

// A run of one source tensor's bytes.
struct ReadSegment {
  int32_t source = 0;             // into Checkpoint::tensors
  int64_t file_offset_bytes = 0;  // where it starts
  int64_t size_bytes = 0;         // > 0
};

// A run of one file without a gap, read at once.
struct ReadItem {
  int32_t file_index = 0;
  int64_t begin_bytes = 0;
  int64_t end_bytes = 0;
  std::vector<ReadSegment> segments;  // in file order; together they are [begin_bytes, end_bytes)
};

// Where tensors are cut between two reads: at multiples of this from their start, or of twice it if they are converted,
// so that what lands of each part is whole words, which can be digested by themselves; or between two rows of blocks.
inline constexpr int64_t kCutBytes = kDigestWordBytes;

class ReadPlan {
 public:
  // With its ends rounded out to kDirectAlignmentBytes no item is longer than `chunk_bytes`, which is a multiple of
  // that and at least twice it, but for one that has a single row of blocks of a tensor that is quantized.
  //
  // With `landing_bytes`, items end where what they hold lands at a multiple of it in a slab, as far as it is copied in
  // one run, and not at blocks of the file; then they are `chunk_bytes` long at most without rounding. So one write
  // fills all of a huge page: of one that a shorter write begins the kernel clears the rest. A multiple of
  // kTensorAlignmentBytes; 0: not.
  //
  // `checkpoint` and `plan` outlive this object.
  ReadPlan(const Checkpoint& checkpoint, const NodePlan& plan, int64_t chunk_bytes, int64_t landing_bytes = 0);

  // In the order in which they are best read: what goes to one slab of one shard comes in file order, and what goes to
  // different ones takes turns, so that all GPUs are busy, and all threads that fill host memory. Every byte that a
  // piece wants is in exactly one segment. Items that do not end at blocks of the file share one with their neighbours,
  // which is then read twice: with landings, and of tensors at offsets that are no multiples of 8.
  const std::vector<ReadItem>& items() const { return items_; }

  // The length of a buffer that any item fits, with its ends rounded out to kDirectAlignmentBytes.
  int64_t buffer_bytes() const { return buffer_bytes_; }

  // What becomes of an item's bytes in one of the plan's shards, in file order.
  std::vector<Transfer> TransfersOf(const ReadItem& item, size_t shard) const;

 private:
  // A piece of a shard's tensor.
  struct Use {
    int32_t source = 0;
    int32_t shard = 0;
    int32_t tensor = 0;
    const Piece* piece = nullptr;
  };

  void CollectUses();
  void BuildItems(int64_t chunk_bytes, int64_t landing_bytes);
  std::optional<int64_t> LastLanding(int32_t source, ByteRange range, int64_t unit_bytes, int64_t landing_bytes) const;
  void LetSlabsTakeTurns();
  size_t SlabOf(const ReadItem& item) const;
  int64_t CutUnitOf(int32_t source) const;
  Transform TransformOf(const Use& use) const;

  const Checkpoint& checkpoint_;
  const NodePlan& plan_;
  std::vector<Use> uses_;            // by source, then shard
  std::vector<size_t> first_slabs_;  // for each shard, the number of its first slab; one more at the end
  std::vector<size_t> first_uses_;   // for each source, where its uses start; one more at the end
  std::vector<ReadItem> items_;
  int64_t buffer_bytes_ = 0;
};

}  // namespace weightbroker
