#include "common/load/host_destination.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/mutex.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/load/not_finite.h"
#include "common/load/read_plan.h"
#include "common/quant/convert.h"
#include "common/quant/fp8_block.h"

namespace weightbroker {
namespace {

bool IsWords(int64_t bytes) { return bytes % kDigestWordBytes == 0; }

int64_t ElementBytes(const TensorPlacement& tensor) { return tensor.dtype->bits / 8; }

// Whether every part of a piece that a transfer can carry is whole words of the tensor, so that it can be digested
// while it is in cache.
bool LandsInWholeWords(const TensorPlacement& tensor, const Piece& piece) {
  const int64_t size = ElementBytes(tensor);
  const bool ends_the_tensor = piece.run_count == 1 && (piece.offset + piece.run_elements) * size == tensor.size_bytes;
  const bool several = piece.run_count > 1;
  return IsWords(piece.offset * size) && IsWords(piece.source_offset * size) &&
         (ends_the_tensor || IsWords(piece.run_elements * size)) && (!several || IsWords(piece.stride * size)) &&
         (!several || IsWords(piece.source_stride * size));
}

int64_t CoveredElements(const TensorPlacement& tensor) {
  int64_t covered = 0;
  for (const Piece& piece : tensor.pieces) covered += piece.run_count * piece.run_elements;
  return covered;
}

// The same of rows that are quantized, which a transfer carries whole.
bool RowsAreWholeWords(const Piece& piece) {
  return IsWords(piece.offset) && IsWords(piece.run_elements) && IsWords(piece.stride);
}

bool CanDigestInFlight(const TensorPlacement& tensor) {
  if (tensor.transform == Transform::kTranspose) return false;
  if (CoveredElements(tensor) * ElementBytes(tensor) != tensor.size_bytes) return false;
  const bool quantized = tensor.transform == Transform::kQuantizeFp8Block;
  return std::all_of(tensor.pieces.begin(), tensor.pieces.end(), [&](const Piece& piece) {
    return quantized ? RowsAreWholeWords(piece) : LandsInWholeWords(tensor, piece);
  });
}

class HostDestination : public Destination {
 public:
  HostDestination(const ShardPlan& plan, std::span<HostSlab> slabs, FillMethod fill_method)
      : plan_(plan), slabs_(slabs), fill_method_(fill_method), sums_(plan.tensors.size()) {
    for (const TensorPlacement& tensor : plan.tensors) digested_in_flight_.push_back(CanDigestInFlight(tensor));
  }

  absl::Status Store(std::span<const std::byte> chunk, std::span<const Transfer> transfers) override {
    std::vector<DigestAccumulator> sums(transfers.size());
    for (size_t i = 0; i < transfers.size();) {
      const size_t count = RunOfNeighbours(transfers.subspan(i));
      const auto run = transfers.subspan(i, count);
      const auto run_sums = std::span(sums).subspan(i, count);
      RETURN_IF_ERROR(count > 0 && WritesTo(SlabOf(run.front())) ? Write(chunk, run, run_sums)
                                                                 : StoreEach(chunk, transfers, i, count, sums));
      i += std::max<size_t>(count, 1);
    }
    MutexLock lock(mutex_);
    for (size_t i = 0; i < sums.size(); ++i) {
      if (IsDigestedInFlight(transfers[i])) sums_[static_cast<size_t>(transfers[i].tensor)].Merge(sums[i]);
    }
    return absl::OkStatus();
  }

  absl::Status Release(std::span<const std::byte> /*chunk*/) override { return absl::OkStatus(); }

  absl::StatusOr<std::vector<Digest>> Finish() override {
    std::vector<Digest> digests(plan_.tensors.size());
    std::map<std::string_view, size_t> by_name;
    for (size_t i = 0; i < digests.size(); ++i) {
      const TensorPlacement& tensor = plan_.tensors[i];
      by_name[tensor.name] = i;
      if (!tensor.alias_of.empty()) continue;
      if (digested_in_flight_[i]) {
        MutexLock lock(mutex_);
        digests[i] = sums_[i].Finish(tensor.size_bytes);
      } else {
        digests[i] = ComputeDigest({PlaceOf(tensor), static_cast<size_t>(tensor.size_bytes)});
      }
    }
    for (size_t i = 0; i < digests.size(); ++i) {
      const std::string& target = plan_.tensors[i].alias_of;
      if (!target.empty()) digests[i] = digests[by_name.at(target)];
    }
    return digests;
  }

 private:
  const TensorPlacement& TensorOf(const Transfer& transfer) const {
    return plan_.tensors[static_cast<size_t>(transfer.tensor)];
  }
  HostSlab& SlabOf(const Transfer& transfer) const { return slabs_[static_cast<size_t>(TensorOf(transfer).slab)]; }
  bool IsDigestedInFlight(const Transfer& transfer) const {
    return digested_in_flight_[static_cast<size_t>(transfer.tensor)];
  }
  std::byte* PlaceOf(const TensorPlacement& tensor) const {
    return slabs_[static_cast<size_t>(tensor.slab)].writable_bytes().data() + tensor.slab_offset_bytes;
  }

  bool WritesTo(const HostSlab& slab) const {
    if (fill_method_ == FillMethod::kBest) return slab.PrefersWrite();
    return fill_method_ == FillMethod::kWrite;
  }

  // Where a transfer's first element lies in its slab.
  int64_t SlabOffset(const Transfer& transfer) const {
    const TensorPlacement& tensor = TensorOf(transfer);
    return tensor.slab_offset_bytes + transfer.offset * ElementBytes(tensor);
  }
  int64_t RunBytes(const Transfer& transfer) const { return transfer.run_elements * ElementBytes(TensorOf(transfer)); }

  bool IsPlainRun(const Transfer& transfer) const {
    return transfer.transform == Transform::kCopy && transfer.run_count == 1;
  }

  // Whether `next` lands right behind `transfer`, with nothing but the padding between two tensors in between.
  bool IsNeighbour(const Transfer& transfer, const Transfer& next) const {
    const int64_t end = SlabOffset(transfer) + RunBytes(transfer);
    if (TensorOf(transfer).slab != TensorOf(next).slab || SlabOffset(next) < end) return false;
    if (SlabOffset(next) == end) return true;
    const TensorPlacement& tensor = TensorOf(transfer);
    return end == tensor.slab_offset_bytes + tensor.size_bytes && next.offset == 0 &&
           SlabOffset(next) - end < kTensorAlignmentBytes;
  }

  // How many of the first transfers are plain runs that land one behind the other; 0 if the first is none.
  size_t RunOfNeighbours(std::span<const Transfer> transfers) const {
    size_t count = 0;
    while (count < transfers.size() && IsPlainRun(transfers[count]) &&
           (count == 0 || IsNeighbour(transfers[count - 1], transfers[count]))) {
      ++count;
    }
    return count;
  }

  std::span<const std::byte> SourceOf(std::span<const std::byte> chunk, const Transfer& transfer) const {
    return chunk.subspan(static_cast<size_t>(transfer.source_offset_bytes),
                         static_cast<size_t>(transfer.run_elements * transfer.source_dtype->bits / 8));
  }

  absl::Status Write(std::span<const std::byte> chunk, std::span<const Transfer> run,
                     std::span<DigestAccumulator> sums) {
    static constexpr std::byte kGap[kTensorAlignmentBytes] = {};
    std::vector<std::span<const std::byte>> parts;
    int64_t end = SlabOffset(run.front());
    for (size_t i = 0; i < run.size(); ++i) {
      const auto from = SourceOf(chunk, run[i]);
      if (IsDigestedInFlight(run[i])) sums[i].Add(run[i].offset * ElementBytes(TensorOf(run[i])), from);
      parts.push_back(std::span(kGap).first(static_cast<size_t>(SlabOffset(run[i]) - end)));
      parts.push_back(from);
      end = SlabOffset(run[i]) + RunBytes(run[i]);
    }
    return SlabOf(run.front()).Write(SlabOffset(run.front()), parts);
  }

  // Stores transfers `first` to `first + count`, or one that is no plain run, through the mapping.
  absl::Status StoreEach(std::span<const std::byte> chunk, std::span<const Transfer> transfers, size_t first,
                         size_t count, std::span<DigestAccumulator> sums) {
    if (count > 1) {
      RETURN_IF_ERROR(Populate(transfers[first], transfers[first + count - 1]));
    }
    for (size_t i = first; i < first + std::max<size_t>(count, 1); ++i) {
      if (count <= 1) RETURN_IF_ERROR(Populate(transfers[i], transfers[i]));
      RETURN_IF_ERROR(StoreOne(chunk, transfers[i], sums[i]));
    }
    return absl::OkStatus();
  }

  // Makes the pages from `first`'s start to `last`'s end be there.
  absl::Status Populate(const Transfer& first, const Transfer& last) {
    const int64_t begin = SlabOffset(first);
    const int64_t elements = (last.run_count - 1) * last.stride + (last.run_elements - 1) * last.element_stride + 1;
    const int64_t end = SlabOffset(last) + elements * ElementBytes(TensorOf(last));
    return SlabOf(first).Populate(begin, end - begin);
  }

  absl::Status StoreOne(std::span<const std::byte> chunk, const Transfer& transfer, DigestAccumulator& sum) {
    const TensorPlacement& tensor = TensorOf(transfer);
    if (transfer.transform == Transform::kQuantizeFp8Block) return Quantize(chunk, transfer, sum);
    const int64_t size = ElementBytes(tensor);
    const std::byte* source = chunk.data() + transfer.source_offset_bytes;
    int64_t offset = transfer.offset;
    for (int64_t run = 0; run < transfer.run_count; ++run) {
      std::byte* const to = PlaceOf(tensor) + offset * size;
      StoreRun(transfer, tensor, source, offset * size, to, sum);
      source += transfer.source_stride_bytes;
      offset += transfer.stride;
    }
    return absl::OkStatus();
  }

  void StoreRun(const Transfer& transfer, const TensorPlacement& tensor, const std::byte* source, int64_t offset_bytes,
                std::byte* to, DigestAccumulator& sum) const {
    const auto bytes = static_cast<size_t>(RunBytes(transfer));
    if (transfer.transform == Transform::kTranspose) return TransposeRun(transfer, tensor, source, to);
    if (transfer.transform == Transform::kConvert) {
      ConvertElements(*transfer.source_dtype, source, *tensor.dtype, to, transfer.run_elements);
      if (IsDigestedInFlight(transfer)) sum.Add(offset_bytes, {to, bytes});
    } else if (IsDigestedInFlight(transfer)) {
      CopyAndDigest(offset_bytes, {source, bytes}, to, sum);
    } else {
      std::memcpy(to, source, bytes);
    }
  }

  static void TransposeRun(const Transfer& transfer, const TensorPlacement& tensor, const std::byte* source,
                           std::byte* to) {
    const int64_t from_bytes = transfer.source_dtype->bits / 8;
    const int64_t to_bytes = transfer.element_stride * ElementBytes(tensor);
    const bool converts = transfer.source_dtype != tensor.dtype;
    for (int64_t i = 0; i < transfer.run_elements; ++i, source += from_bytes, to += to_bytes) {
      if (converts) {
        ConvertElements(*transfer.source_dtype, source, *tensor.dtype, to, 1);
      } else {
        std::memcpy(to, source, static_cast<size_t>(from_bytes));
      }
    }
  }

  absl::Status Quantize(std::span<const std::byte> chunk, const Transfer& transfer, DigestAccumulator& sum) {
    const TensorPlacement& tensor = TensorOf(transfer);
    const TensorPlacement& scales = plan_.tensors[static_cast<size_t>(tensor.scale_tensor)];
    RETURN_IF_ERROR(slabs_[static_cast<size_t>(scales.slab)].Populate(scales.slab_offset_bytes, scales.size_bytes));
    const Fp8BlockSource source = {.dtype = transfer.source_dtype,
                                   .data = chunk.data() + transfer.source_offset_bytes,
                                   .row_bytes = transfer.source_stride_bytes};
    const Fp8BlockResult result = {.data = PlaceOf(tensor) + transfer.offset,
                                   .row_elements = transfer.stride,
                                   .scales = reinterpret_cast<float*>(PlaceOf(scales)) + transfer.scale_offset,
                                   .scale_stride = transfer.scale_stride};
    const auto bad = QuantizeFp8Block(source, transfer.run_count, transfer.run_elements, result);
    if (bad.has_value()) {
      return WeightNotFinite(tensor, transfer.offset + bad->row * transfer.stride + bad->column);
    }
    if (!IsDigestedInFlight(transfer)) return absl::OkStatus();
    for (int64_t row = 0; row < transfer.run_count; ++row) {
      const int64_t offset = transfer.offset + row * transfer.stride;
      sum.Add(offset, {PlaceOf(tensor) + offset, static_cast<size_t>(transfer.run_elements)});
    }
    return absl::OkStatus();
  }

  const ShardPlan& plan_;
  const std::span<HostSlab> slabs_;  // different threads fill different bytes
  const FillMethod fill_method_;
  std::vector<bool> digested_in_flight_;  // of plan_.tensors; constant after construction

  Mutex mutex_;
  std::vector<DigestAccumulator> sums_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<Destination> MakeHostDestination(const ShardPlan& plan, std::span<HostSlab> slabs,
                                                 FillMethod fill_method) {
  return std::make_unique<HostDestination>(plan, slabs, fill_method);
}

}  // namespace weightbroker
