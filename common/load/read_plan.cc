#include "common/load/read_plan.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "common/base/file.h"
#include "common/quant/gate.h"

namespace weightbroker {
namespace {

int64_t RoundDown(int64_t value) { return value / kDirectAlignmentBytes * kDirectAlignmentBytes; }
int64_t RoundUp(int64_t value) { return RoundDown(value + kDirectAlignmentBytes - 1); }

class ItemBuilder {
 public:
  // Where an item is best cut: the last such place of a source in a range, both ends included. Null: at blocks of the
  // file.
  using LastLanding = std::function<std::optional<int64_t>(int32_t source, ByteRange range, int64_t unit_bytes)>;

  ItemBuilder(const Checkpoint& checkpoint, int64_t chunk_bytes, LastLanding last_landing)
      : checkpoint_(checkpoint), chunk_bytes_(chunk_bytes), last_landing_(std::move(last_landing)) {}

  // Adds a range of a source, which may be cut at multiples of `unit_bytes` from the source's start.
  void Add(int32_t source, ByteRange range, int64_t unit_bytes) {
    const CheckpointTensor& tensor = checkpoint_.tensors[static_cast<size_t>(source)];
    while (range.begin_bytes < range.end_bytes) {
      const int64_t at = tensor.offset_bytes + range.begin_bytes;
      if (!Continues(tensor.file_index, at)) StartItem(tensor.file_index, at);
      const int64_t end = EndOfSegment(source, range, unit_bytes);
      if (end == range.begin_bytes) {
        StartItem(tensor.file_index, at);
        continue;
      }
      items_.back().segments.push_back({source, at, end - range.begin_bytes});
      items_.back().end_bytes = tensor.offset_bytes + end;
      range.begin_bytes = end;
    }
  }

  std::vector<ReadItem> Finish() && { return std::move(items_); }

 private:
  bool Continues(int32_t file_index, int64_t at) const {
    return !items_.empty() && items_.back().file_index == file_index && items_.back().end_bytes == at;
  }

  void StartItem(int32_t file_index, int64_t at) {
    items_.push_back({.file_index = file_index, .begin_bytes = at, .end_bytes = at, .segments = {}});
    limit_ = (last_landing_ != nullptr ? at : RoundDown(at)) + chunk_bytes_;
  }

  // How much of a range the current item takes: up to a place of the source, the range's start if none. One that has
  // nothing yet takes something.
  int64_t EndOfSegment(int32_t source, ByteRange range, int64_t unit_bytes) {
    const int64_t start = checkpoint_.tensors[static_cast<size_t>(source)].offset_bytes;
    const bool is_first = items_.back().segments.empty();
    int64_t end = FurthestCut(range.begin_bytes, range.end_bytes, unit_bytes, limit_ - start);
    if (end <= range.begin_bytes) {
      if (!is_first) return range.begin_bytes;
      end = std::min(range.end_bytes, (range.begin_bytes / unit_bytes + 1) * unit_bytes);
    }
    if (last_landing_ == nullptr) return end;
    const std::optional<int64_t> landing = last_landing_(source, {range.begin_bytes, end}, unit_bytes);
    if (!landing.has_value() || (is_first && landing == range.begin_bytes)) return end;
    limit_ = start + *landing;
    return *landing;
  }

  // The last place up to `limit`, all from the source's start, where the source may be cut; `offset` or before if there
  // is none after it.
  static int64_t FurthestCut(int64_t offset, int64_t range_end, int64_t unit_bytes, int64_t limit) {
    if (range_end <= limit) return range_end;
    return limit <= offset ? offset : limit / unit_bytes * unit_bytes;
  }

  const Checkpoint& checkpoint_;
  const int64_t chunk_bytes_;
  const LastLanding last_landing_;
  int64_t limit_ = 0;  // where the current item must end, in the file
  std::vector<ReadItem> items_;
};

// Turns the part of a piece that lies in elements [begin, end) of its source into transfers.
class PieceCutter {
 public:
  PieceCutter(const Piece& piece, const Transfer& common, int64_t element_bytes, int64_t begin, int64_t begin_in_chunk,
              std::vector<Transfer>& out)
      : piece_(piece),
        common_(common),
        element_bytes_(element_bytes),
        begin_(begin),
        begin_in_chunk_bytes_(begin_in_chunk),
        out_(out) {}

  void Cut(int64_t end) {
    const int64_t first = std::max<int64_t>(0, RunAt(begin_));
    const int64_t last = std::min(piece_.run_count - 1, RunAt(end - 1));
    if (first > last || end <= piece_.source_offset) return;
    if (common_.transform == Transform::kQuantizeFp8Block) return Emit(first, last, 0, piece_.run_elements);
    const int64_t skipped = std::max<int64_t>(0, begin_ - RunStart(first));
    const int64_t last_end = std::min(piece_.run_elements, end - RunStart(last));
    if (first == last) return Emit(first, first, skipped, last_end);
    if (skipped > 0) Emit(first, first, skipped, piece_.run_elements);
    const int64_t whole_first = skipped > 0 ? first + 1 : first;
    const int64_t whole_last = last_end < piece_.run_elements ? last - 1 : last;
    Emit(whole_first, whole_last, 0, piece_.run_elements);
    if (last_end < piece_.run_elements) Emit(last, last, 0, last_end);
  }

 private:
  int64_t RunStart(int64_t run) const { return piece_.source_offset + run * piece_.source_stride; }

  // The run that holds `element` or is the last to start before it; with rows that are quantized, the row's.
  int64_t RunAt(int64_t element) const {
    if (piece_.run_count == 1 && common_.transform != Transform::kQuantizeFp8Block) return 0;
    const int64_t origin = common_.transform == Transform::kQuantizeFp8Block
                               ? piece_.source_offset / piece_.source_stride * piece_.source_stride
                               : piece_.source_offset;
    return element < origin ? -1 : (element - origin) / piece_.source_stride;
  }

  // Elements [begin, end) of runs first..last.
  void Emit(int64_t first, int64_t last, int64_t begin, int64_t end) {
    if (first > last || begin >= end) return;
    Transfer transfer = common_;
    transfer.run_elements = end - begin;
    transfer.run_count = last - first + 1;
    transfer.source_offset_bytes = begin_in_chunk_bytes_ + (RunStart(first) + begin - begin_) * element_bytes_;
    transfer.source_stride_bytes = piece_.source_stride * element_bytes_;
    transfer.offset = piece_.offset + first * piece_.stride + begin * piece_.element_stride;
    transfer.stride = piece_.stride;
    transfer.element_stride = piece_.element_stride;
    transfer.scale_offset = piece_.scale_offset + first / kFp8BlockSize[0] * piece_.scale_stride;
    transfer.scale_stride = piece_.scale_stride;
    out_.push_back(transfer);
  }

  const Piece& piece_;
  const Transfer& common_;
  const int64_t element_bytes_;
  const int64_t begin_;                 // element of the source at which the segment starts
  const int64_t begin_in_chunk_bytes_;  // where that is in the chunk
  std::vector<Transfer>& out_;
};

}  // namespace

ReadPlan::ReadPlan(const Checkpoint& checkpoint, const NodePlan& plan, int64_t chunk_bytes, int64_t landing_bytes)
    : checkpoint_(checkpoint), plan_(plan) {
  CollectUses();
  BuildItems(chunk_bytes, landing_bytes);
  LetSlabsTakeTurns();
}

void ReadPlan::CollectUses() {
  for (size_t shard = 0; shard < plan_.shards.size(); ++shard) {
    const auto& tensors = plan_.shards[shard].tensors;
    for (size_t tensor = 0; tensor < tensors.size(); ++tensor) {
      for (const Piece& piece : tensors[tensor].pieces) {
        uses_.push_back({piece.source, static_cast<int32_t>(shard), static_cast<int32_t>(tensor), &piece});
      }
    }
  }
  const auto key = [](const Use& use) { return std::make_tuple(use.source, use.shard, use.piece->source_offset); };
  std::stable_sort(uses_.begin(), uses_.end(), [&](const Use& a, const Use& b) { return key(a) < key(b); });
  first_uses_.assign(checkpoint_.tensors.size() + 1, 0);
  for (const Use& use : uses_) ++first_uses_[static_cast<size_t>(use.source) + 1];
  std::partial_sum(first_uses_.begin(), first_uses_.end(), first_uses_.begin());
}

Transform ReadPlan::TransformOf(const Use& use) const {
  return plan_.shards[static_cast<size_t>(use.shard)].tensors[static_cast<size_t>(use.tensor)].transform;
}

int64_t ReadPlan::CutUnitOf(int32_t source) const {
  const CheckpointTensor& tensor = checkpoint_.tensors[static_cast<size_t>(source)];
  int64_t unit_bytes = kCutBytes;
  for (size_t i = first_uses_[static_cast<size_t>(source)]; i < first_uses_[static_cast<size_t>(source) + 1]; ++i) {
    const Transform transform = TransformOf(uses_[i]);
    if (transform == Transform::kQuantizeFp8Block)
      return kFp8BlockSize[0] * tensor.shape.back() * tensor.dtype->bits / 8;
    if (transform != Transform::kCopy) unit_bytes = 2 * kCutBytes;
  }
  return unit_bytes;
}

// The last place in `range` of a source that is copied, whole runs of it, to a multiple of `landing_bytes` in a slab,
// and may be cut; nothing if there is none.
std::optional<int64_t> ReadPlan::LastLanding(int32_t source, ByteRange range, int64_t unit_bytes,
                                             int64_t landing_bytes) const {
  std::optional<int64_t> last;
  const int64_t element_bytes = checkpoint_.tensors[static_cast<size_t>(source)].dtype->bits / 8;
  for (size_t i = first_uses_[static_cast<size_t>(source)]; i < first_uses_[static_cast<size_t>(source) + 1]; ++i) {
    const Piece& piece = *uses_[i].piece;
    if (TransformOf(uses_[i]) != Transform::kCopy || piece.run_count > 1) continue;
    const TensorPlacement& tensor =
        plan_.shards[static_cast<size_t>(uses_[i].shard)].tensors[static_cast<size_t>(uses_[i].tensor)];
    const int64_t start = piece.source_offset * element_bytes;
    const int64_t start_in_slab = tensor.slab_offset_bytes + piece.offset * element_bytes;
    const int64_t end = std::min(range.end_bytes, start + piece.run_elements * element_bytes);
    if (end < start) continue;
    const int64_t landing = (start_in_slab + end - start) / landing_bytes * landing_bytes - start_in_slab + start;
    if (landing < std::max(start, range.begin_bytes) || landing % unit_bytes != 0) continue;
    last = std::max(last.value_or(landing), landing);
  }
  return last;
}

void ReadPlan::BuildItems(int64_t chunk_bytes, int64_t landing_bytes) {
  std::vector<int32_t> sources(checkpoint_.tensors.size());
  std::iota(sources.begin(), sources.end(), 0);
  std::sort(sources.begin(), sources.end(), [&](int32_t a, int32_t b) {
    const auto key = [&](int32_t source) {
      const CheckpointTensor& tensor = checkpoint_.tensors[static_cast<size_t>(source)];
      return std::make_tuple(tensor.file_index, tensor.offset_bytes, tensor.size_bytes);
    };
    return key(a) < key(b);
  });
  ItemBuilder::LastLanding last_landing;
  if (landing_bytes > 0) {
    last_landing = [&](int32_t source, ByteRange range, int64_t unit_bytes) {
      return LastLanding(source, range, unit_bytes, landing_bytes);
    };
  }
  ItemBuilder builder(checkpoint_, chunk_bytes, std::move(last_landing));
  std::vector<PieceUse> pieces;
  for (const int32_t source : sources) {
    const CheckpointTensor& tensor = checkpoint_.tensors[static_cast<size_t>(source)];
    pieces.clear();
    for (size_t i = first_uses_[static_cast<size_t>(source)]; i < first_uses_[static_cast<size_t>(source) + 1]; ++i) {
      pieces.push_back({uses_[i].piece, TransformOf(uses_[i])});
    }
    const int64_t unit_bytes = CutUnitOf(source);
    for (const ByteRange& range : WantedBytes(tensor, pieces)) builder.Add(source, range, unit_bytes);
  }
  items_ = std::move(builder).Finish();
  buffer_bytes_ = chunk_bytes;
  for (const ReadItem& item : items_) {
    buffer_bytes_ = std::max(buffer_bytes_, RoundUp(item.end_bytes) - RoundDown(item.begin_bytes));
  }
}

// The number of the slab that the item's first byte goes to, of the first shard that wants it.
size_t ReadPlan::SlabOf(const ReadItem& item) const {
  const ReadSegment& segment = item.segments.front();
  const CheckpointTensor& source = checkpoint_.tensors[static_cast<size_t>(segment.source)];
  const int64_t element = (segment.file_offset_bytes - source.offset_bytes) * 8 / source.dtype->bits;
  const auto index = static_cast<size_t>(segment.source);
  for (size_t i = first_uses_[index]; i < first_uses_[index + 1]; ++i) {
    const Piece& piece = *uses_[i].piece;
    const int64_t end = piece.source_offset + (piece.run_count - 1) * piece.source_stride + piece.run_elements;
    if (end <= element) continue;
    const auto shard = static_cast<size_t>(uses_[i].shard);
    const TensorPlacement& tensor = plan_.shards[shard].tensors[static_cast<size_t>(uses_[i].tensor)];
    return first_slabs_[shard] + static_cast<size_t>(tensor.slab);
  }
  return 0;
}

// All slabs are begun and ended together, whatever their length.
void ReadPlan::LetSlabsTakeTurns() {
  first_slabs_.assign(1, 0);
  for (const ShardPlan& shard : plan_.shards) first_slabs_.push_back(first_slabs_.back() + shard.slab_bytes.size());
  if (first_slabs_.back() <= 1) return;
  struct Turn {
    size_t slab = 0;
    double when = 0;  // bytes before it of its slab; then as a part of all that the slab has
    size_t item = 0;
  };
  std::vector<double> slab_bytes(first_slabs_.back());
  std::vector<Turn> turns;
  turns.reserve(items_.size());
  for (size_t i = 0; i < items_.size(); ++i) {
    double& bytes = slab_bytes[turns.emplace_back(Turn{SlabOf(items_[i]), 0, i}).slab];
    turns.back().when = bytes;
    bytes += static_cast<double>(items_[i].end_bytes - items_[i].begin_bytes);
  }
  for (Turn& turn : turns) turn.when /= slab_bytes[turn.slab];
  std::sort(turns.begin(), turns.end(),
            [](const Turn& a, const Turn& b) { return std::tie(a.when, a.item) < std::tie(b.when, b.item); });
  std::vector<ReadItem> sorted;
  sorted.reserve(items_.size());
  for (const Turn& turn : turns) sorted.push_back(std::move(items_[turn.item]));
  items_ = std::move(sorted);
}

std::vector<Transfer> ReadPlan::TransfersOf(const ReadItem& item, size_t shard) const {
  std::vector<Transfer> transfers;
  for (const ReadSegment& segment : item.segments) {
    const CheckpointTensor& source = checkpoint_.tensors[static_cast<size_t>(segment.source)];
    const int64_t element_bytes = source.dtype->bits / 8;
    const int64_t begin = (segment.file_offset_bytes - source.offset_bytes) / element_bytes;
    const auto index = static_cast<size_t>(segment.source);
    for (size_t i = first_uses_[index]; i < first_uses_[index + 1]; ++i) {
      const Use& use = uses_[i];
      if (static_cast<size_t>(use.shard) != shard) continue;
      Transfer common;
      common.tensor = use.tensor;
      common.transform = TransformOf(use);
      common.source_dtype = source.dtype;
      PieceCutter cutter(*use.piece, common, element_bytes, begin, segment.file_offset_bytes - item.begin_bytes,
                         transfers);
      cutter.Cut(begin + segment.size_bytes / element_bytes);
    }
  }
  return transfers;
}

}  // namespace weightbroker
