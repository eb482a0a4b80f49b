#include "common/load/cuda_destination.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/device/gpu_digest.h"
#include "common/device/gpu_kernel.h"
#include "common/device/gpu_quantizer.h"
#include "common/device/gpu_run_copier.h"
#include "common/device/kernels/kernels.h"
#include "common/device/kernels/scatter_runs.h"
#include "common/load/landed_digests.h"
#include "common/load/not_finite.h"
#include "common/quant/convert.h"

namespace weightbroker {
namespace {

// A list of the short runs of a chunk is this long at most where tensors have 2 KiB; pinning 1 MiB takes 0.7 ms.
constexpr int64_t kStagingGranularityBytes = 64 << 10;

// Device memory for what is not yet where it belongs is allocated in blocks of this: one call for the chunks of several
// threads.
constexpr int64_t kScratchBlockBytes = 64 << 20;

int64_t ElementBytes(const DtypeInfo& dtype) { return dtype.bits / 8; }

// A copy engine's call for a run of this length takes no longer than its bytes do; of shorter ones, all of a chunk are
// copied by one launch, but for a few.
constexpr int64_t kShortRunBytes = 512 << 10;
constexpr size_t kFewRuns = 4;

// Rows that start at multiples of this are loaded by the kernel in whole vectors.
constexpr int64_t kVectorBytes = 16;

int64_t RoundUpTo(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

bool QuantizesAnything(const ShardPlan& plan) {
  return std::any_of(plan.tensors.begin(), plan.tensors.end(),
                     [](const TensorPlacement& tensor) { return tensor.transform == Transform::kQuantizeFp8Block; });
}

Fp8Source SourceOf(const DtypeInfo& dtype) {
  if (dtype.proto == v1::DATA_TYPE_BF16) return Fp8Source::kBf16;
  return dtype.proto == v1::DATA_TYPE_F16 ? Fp8Source::kF16 : Fp8Source::kF32;
}

// Memory that is kept for the next one who needs as much: pinned on the host, or on the device.
template <typename Address>
class Pool {
 public:
  struct Piece {
    Address address = {};
    int64_t size_bytes = 0;
  };

  std::optional<Piece> Take(int64_t size_bytes) {
    const auto fit =
        std::find_if(free_.begin(), free_.end(), [&](const Piece& p) { return p.size_bytes >= size_bytes; });
    if (fit == free_.end()) return std::nullopt;
    const Piece piece = *fit;
    free_.erase(fit);
    return piece;
  }
  void Give(const Piece& piece) { free_.push_back(piece); }
  const std::vector<Piece>& free() const { return free_; }

 private:
  std::vector<Piece> free_;
};

class CudaDestination : public Destination {
 public:
  CudaDestination(const ShardPlan& plan, std::vector<GpuRange> slabs, CudaContext context, GpuDigester digester,
                  GpuKernel scatter, GpuRunCopier run_copier, std::optional<GpuQuantizer> quantizer,
                  std::function<absl::Status()> once_landed)
      : plan_(plan),
        slabs_(std::move(slabs)),
        context_(std::move(context)),
        cuda_(context_.driver()),
        digester_(std::move(digester)),
        scatter_(std::move(scatter)),
        run_copier_(std::move(run_copier)),
        quantizer_(std::move(quantizer)),
        once_landed_(std::move(once_landed)) {}

  // Nothing is under way any more unless something has failed; then the driver waits for it.
  ~CudaDestination() override {
    const CudaScope current(context_);
    for (const auto& [thread, stream] : streams_) End(stream);
    if (kernels_ != nullptr) End(kernels_);
    for (auto& [chunk, flight] : flights_) Recycle(std::move(flight));
    for (CudaEvent const event : events_) (void)cuda_.EventDestroy(event);
    if (cleared_ != nullptr) (void)cuda_.EventDestroy(cleared_);
    for (const auto& piece : staging_.free()) (void)cuda_.MemFreeHost(piece.address);
    for (CudaDevicePtr const block : scratch_blocks_) (void)cuda_.MemFree(block);
    if (not_finite_ != 0) (void)cuda_.MemFree(not_finite_);
  }

  // Before the first Store. Clearing 32 GiB takes 8 ms, for which only copies wait.
  absl::Status Prepare(int64_t digest_batch_bytes) {
    const CudaScope current(context_);
    RETURN_IF_ERROR(current.status());
    RETURN_IF_ERROR(Check(cuda_.StreamCreate(kCudaStreamNonBlocking, &kernels_), "cuStreamCreate"));
    ASSIGN_OR_RETURN(digests_, LandedDigests::Create(plan_, PlacesOfTensors(), digester_, digest_batch_bytes));
    if (quantizer_.has_value()) {
      const size_t size = plan_.tensors.size() * sizeof(uint64_t);
      RETURN_IF_ERROR(Check(cuda_.MemAlloc(size, &not_finite_), "cuMemAlloc"));
      RETURN_IF_ERROR(Check(cuda_.MemsetD8Async(not_finite_, 0xFF, size, kernels_), "cuMemsetD8Async"));
    }
    for (const GpuRange& slab : slabs_) {
      RETURN_IF_ERROR(Check(cuda_.MemsetD8Async(slab.address, 0, static_cast<size_t>(slab.size_bytes), kernels_),
                            "cuMemsetD8Async"));
    }
    RETURN_IF_ERROR(Check(cuda_.EventCreate(kCudaEventDisableTiming, &cleared_), "cuEventCreate"));
    return Check(cuda_.EventRecord(cleared_, kernels_), "cuEventRecord");
  }

  absl::Status Store(std::span<const std::byte> chunk, std::span<const Transfer> transfers) override {
    const CudaScope current(context_);
    RETURN_IF_ERROR(current.status());
    ASSIGN_OR_RETURN(CudaStream const copies, StreamOfThisThread());
    Flight flight;
    absl::Status status = TakeEvent(&flight.event);
    if (status.ok()) status = Launch(chunk, transfers, copies, &flight);
    if (!status.ok()) flight.arrivals.clear();  // some may not come
    MutexLock lock(mutex_);
    flights_.emplace(chunk.data(), std::move(flight));
    return status;
  }

  absl::Status Release(std::span<const std::byte> chunk) override {
    std::vector<Flight> landed;
    {
      MutexLock lock(mutex_);
      const auto begin = flights_.lower_bound(chunk.data());
      const auto end = flights_.lower_bound(chunk.data() + chunk.size());
      for (auto it = begin; it != end; ++it) landed.push_back(std::move(it->second));
      flights_.erase(begin, end);
    }
    const CudaScope current(context_);
    absl::Status status = current.status();
    for (Flight& flight : landed) {
      if (flight.event != nullptr) status.Update(Check(cuda_.EventSynchronize(flight.event), "cuEventSynchronize"));
    }
    for (const Flight& flight : landed) {
      if (status.ok()) status = digests_->Landed(flight.arrivals);
    }
    MutexLock lock(mutex_);
    for (Flight& flight : landed) Recycle(std::move(flight));
    return status;
  }

  absl::StatusOr<std::vector<Digest>> Finish() override {
    {
      const CudaScope current(context_);
      RETURN_IF_ERROR(current.status());
      RETURN_IF_ERROR(Check(cuda_.CtxSynchronize(), "cuCtxSynchronize"));
      RETURN_IF_ERROR(CheckAllWereFinite());
    }
    RETURN_IF_ERROR(once_landed_());
    return digests_->Finish();
  }

 private:
  using Staging = Pool<void*>::Piece;
  using Scratch = Pool<CudaDevicePtr>::Piece;

  // What one chunk has under way.
  struct Flight {
    CudaEvent event = nullptr;  // behind all of it
    std::vector<Staging> staging;
    std::vector<Scratch> scratch;
    std::vector<LandedDigests::Arrival> arrivals;
    std::vector<std::function<absl::Status()>> behind_copies;  // kernels to launch once all copies are enqueued
  };

  absl::Status Check(CudaResult result, const char* call) const {
    if (result == kCudaSuccess) return absl::OkStatus();
    return CudaError(cuda_, result, call, absl::StrCat("filling rank ", plan_.rank, " on the GPU"));
  }

  const TensorPlacement& TensorOf(const Transfer& transfer) const {
    return plan_.tensors[static_cast<size_t>(transfer.tensor)];
  }
  CudaDevicePtr PlaceOf(const TensorPlacement& tensor) const {
    return slabs_[static_cast<size_t>(tensor.slab)].address + static_cast<CudaDevicePtr>(tensor.slab_offset_bytes);
  }
  // Where a transfer's first element lands.
  CudaDevicePtr PlaceOf(const Transfer& transfer) const {
    const TensorPlacement& tensor = TensorOf(transfer);
    return PlaceOf(tensor) + static_cast<CudaDevicePtr>(transfer.offset * ElementBytes(*tensor.dtype));
  }

  std::vector<GpuRange> PlacesOfTensors() const {
    std::vector<GpuRange> places;
    for (const TensorPlacement& tensor : plan_.tensors) places.push_back({PlaceOf(tensor), tensor.size_bytes});
    return places;
  }

  // Copies go on the thread's stream, and all kernels that transform on one behind them: no copy waits for such a
  // kernel, nor for what shares a queue of the hardware with one. Records the flight's event also after an error: what
  // has begun needs the chunk until it ends.
  absl::Status Launch(std::span<const std::byte> chunk, std::span<const Transfer> transfers, CudaStream copies,
                      Flight* flight) {
    std::vector<CopyRun> short_runs;
    absl::Status status;
    for (size_t i = 0; status.ok() && i < transfers.size(); ++i) {
      const Transfer& transfer = transfers[i];
      flight->arrivals.push_back({transfer.tensor, transfer.run_count * transfer.run_elements});
      if (IsShortRun(transfer)) {
        AppendRuns(chunk, transfer, &short_runs);
      } else {
        status = Send(chunk, transfer, copies, flight);
      }
    }
    if (status.ok()) status = CopyShortRuns(chunk, short_runs, copies, flight);
    status.Update(Check(cuda_.EventRecord(flight->event, copies), "cuEventRecord"));
    if (!status.ok() || flight->behind_copies.empty()) return status;
    MutexLock lock(kernels_mutex_);
    RETURN_IF_ERROR(Check(cuda_.StreamWaitEvent(kernels_, flight->event), "cuStreamWaitEvent"));
    for (const auto& launch : flight->behind_copies) status.Update(launch());
    flight->behind_copies.clear();
    status.Update(Check(cuda_.EventRecord(flight->event, kernels_), "cuEventRecord"));
    return status;
  }

  absl::Status Send(std::span<const std::byte> chunk, const Transfer& transfer, CudaStream stream, Flight* flight) {
    const std::byte* const source = chunk.data() + transfer.source_offset_bytes;
    switch (transfer.transform) {
      case Transform::kCopy:
        return Copy(transfer, source, transfer.source_stride_bytes, stream);
      case Transform::kConvert:
        return Convert(transfer, source, stream, flight);
      case Transform::kTranspose:
        return Transpose(transfer, source, stream, flight);
      case Transform::kQuantizeFp8Block:
        return Quantize(transfer, source, stream, flight);
    }
    return MakeError(Reason::kProtocolError, "the plan has a transform that is none");
  }

  int64_t RunBytes(const Transfer& transfer) const {
    return transfer.run_elements * ElementBytes(*TensorOf(transfer).dtype);
  }

  bool IsShortRun(const Transfer& transfer) const {
    return transfer.transform == Transform::kCopy && transfer.run_count == 1 && RunBytes(transfer) < kShortRunBytes;
  }

  void AppendRuns(std::span<const std::byte> chunk, const Transfer& transfer, std::vector<CopyRun>* runs) const {
    const auto from = reinterpret_cast<uint64_t>(chunk.data()) + static_cast<uint64_t>(transfer.source_offset_bytes);
    const int64_t size_bytes = RunBytes(transfer);
    for (int64_t at = 0; at < size_bytes; at += kLongestCopyRun) {
      runs->push_back({.from = from + static_cast<uint64_t>(at),
                       .to = PlaceOf(transfer) + static_cast<uint64_t>(at),
                       .size_bytes = std::min(kLongestCopyRun, size_bytes - at)});
    }
  }

  // By one launch if the GPU can read the chunk, and by the copy engine, one after the other, if not or if they are
  // few.
  absl::Status CopyShortRuns(std::span<const std::byte> chunk, const std::vector<CopyRun>& runs, CudaStream stream,
                             Flight* flight) {
    if (runs.size() > kFewRuns && run_copier_.CanRead(chunk)) {
      const size_t size_bytes = runs.size() * sizeof(CopyRun);
      const absl::StatusOr<std::byte*> staging = Stage(static_cast<int64_t>(size_bytes), flight);
      if (staging.ok()) {
        std::memcpy(*staging, runs.data(), size_bytes);
        return run_copier_.Launch({reinterpret_cast<const CopyRun*>(*staging), runs.size()}, stream);
      }
    }
    for (const CopyRun& run : runs) {
      RETURN_IF_ERROR(Check(cuda_.MemcpyHtoDAsync(run.to, reinterpret_cast<const void*>(run.from),
                                                  static_cast<size_t>(run.size_bytes), stream),
                            "cuMemcpyHtoDAsync"));
    }
    return absl::OkStatus();
  }

  // Copies runs of the tensor's own type to where they land.
  absl::Status Copy(const Transfer& transfer, const void* source, int64_t source_stride_bytes, CudaStream stream) {
    const int64_t element = ElementBytes(*TensorOf(transfer).dtype);
    return CopyRows({.to = PlaceOf(transfer),
                     .to_pitch = static_cast<size_t>(transfer.stride * element),
                     .from = source,
                     .from_pitch = static_cast<size_t>(source_stride_bytes),
                     .row_bytes = static_cast<size_t>(transfer.run_elements * element),
                     .rows = static_cast<size_t>(transfer.run_count)},
                    stream);
  }

  absl::Status CopyRows(const CudaRows& rows, CudaStream stream) const {
    const bool contiguous = rows.rows == 1 || (rows.row_bytes == rows.to_pitch && rows.row_bytes == rows.from_pitch);
    if (!contiguous) return Check(cuda_.MemcpyHtoDRowsAsync(rows, stream), "cuMemcpy2DAsync");
    return Check(cuda_.MemcpyHtoDAsync(rows.to, rows.from, rows.row_bytes * rows.rows, stream), "cuMemcpyHtoDAsync");
  }

  absl::Status Convert(const Transfer& transfer, const std::byte* source, CudaStream stream, Flight* flight) {
    ASSIGN_OR_RETURN(const std::byte* const converted, ConvertRuns(transfer, source, flight));
    return Copy(transfer, converted, transfer.run_elements * ElementBytes(*TensorOf(transfer).dtype), stream);
  }

  // The runs in the tensor's own type, one behind the other, in pinned memory.
  absl::StatusOr<std::byte*> ConvertRuns(const Transfer& transfer, const std::byte* source, Flight* flight) {
    const DtypeInfo& dtype = *TensorOf(transfer).dtype;
    const int64_t run_bytes = transfer.run_elements * ElementBytes(dtype);
    ASSIGN_OR_RETURN(std::byte* const staging, Stage(transfer.run_count * run_bytes, flight));
    for (int64_t run = 0; run < transfer.run_count; ++run) {
      ConvertElements(*transfer.source_dtype, source + run * transfer.source_stride_bytes, dtype,
                      staging + run * run_bytes, transfer.run_elements);
    }
    return staging;
  }

  // The GPU quantizes, from a copy of the rows as they are.
  absl::Status Quantize(const Transfer& transfer, const std::byte* source, CudaStream stream, Flight* flight) {
    const TensorPlacement& tensor = TensorOf(transfer);
    const TensorPlacement& scales = plan_.tensors[static_cast<size_t>(tensor.scale_tensor)];
    const int64_t row_bytes = transfer.run_elements * ElementBytes(*transfer.source_dtype);
    const int64_t pitch = RoundUpTo(row_bytes, kVectorBytes);
    ASSIGN_OR_RETURN(const CudaDevicePtr scratch, Scratchpad(transfer.run_count * pitch, flight));
    RETURN_IF_ERROR(CopyRows({.to = scratch,
                              .to_pitch = static_cast<size_t>(pitch),
                              .from = source,
                              .from_pitch = static_cast<size_t>(transfer.source_stride_bytes),
                              .row_bytes = static_cast<size_t>(row_bytes),
                              .rows = static_cast<size_t>(transfer.run_count)},
                             stream));
    const auto scale_offset = static_cast<CudaDevicePtr>(transfer.scale_offset) * sizeof(float);
    const auto tensor_offset = static_cast<CudaDevicePtr>(transfer.tensor) * sizeof(uint64_t);
    const Fp8Source source_type = SourceOf(*transfer.source_dtype);
    const Fp8BlockLaunch rows = {.from = scratch,
                                 .from_row_bytes = pitch,
                                 .to = PlaceOf(transfer),
                                 .to_row_elements = transfer.stride,
                                 .scales = PlaceOf(scales) + scale_offset,
                                 .scale_row_elements = transfer.scale_stride,
                                 .rows = transfer.run_count,
                                 .columns = transfer.run_elements,
                                 .not_finite = not_finite_ + tensor_offset,
                                 .not_finite_base = transfer.offset};
    flight->behind_copies.emplace_back(
        [this, source_type, rows] { return quantizer_->Launch(source_type, rows, kernels_); });
    return absl::OkStatus();
  }

  // Once everything has landed. WEIGHT_NOT_FINITE.
  absl::Status CheckAllWereFinite() {
    if (!quantizer_.has_value()) return absl::OkStatus();
    std::vector<uint64_t> first(plan_.tensors.size());
    ASSIGN_OR_RETURN(CudaStream const stream, StreamOfThisThread());
    RETURN_IF_ERROR(Check(cuda_.MemcpyDtoHAsync(first.data(), not_finite_, first.size() * sizeof(uint64_t), stream),
                          "cuMemcpyDtoHAsync"));
    RETURN_IF_ERROR(Check(cuda_.StreamSynchronize(stream), "cuStreamSynchronize"));
    for (size_t i = 0; i < first.size(); ++i) {
      if (first[i] != ~uint64_t{0}) return WeightNotFinite(plan_.tensors[i], static_cast<int64_t>(first[i]));
    }
    return absl::OkStatus();
  }

  // The GPU moves single elements apart, from a copy of the runs as they are.
  absl::Status Transpose(const Transfer& transfer, const std::byte* source, CudaStream stream, Flight* flight) {
    if (transfer.source_dtype != TensorOf(transfer).dtype) return ConvertAndTranspose(transfer, source, stream, flight);
    return TransposeRuns(transfer, source, transfer.source_stride_bytes, stream, flight);
  }

  absl::Status ConvertAndTranspose(const Transfer& transfer, const std::byte* source, CudaStream stream,
                                   Flight* flight) {
    ASSIGN_OR_RETURN(const std::byte* const converted, ConvertRuns(transfer, source, flight));
    return TransposeRuns(transfer, converted, transfer.run_elements * ElementBytes(*TensorOf(transfer).dtype), stream,
                         flight);
  }

  // Of runs that have the tensor's own type.
  absl::Status TransposeRuns(const Transfer& transfer, const std::byte* source, int64_t source_stride_bytes,
                             CudaStream stream, Flight* flight) {
    const int64_t element = ElementBytes(*TensorOf(transfer).dtype);
    const int64_t run_bytes = transfer.run_elements * element;
    const int64_t source_bytes = (transfer.run_count - 1) * source_stride_bytes + run_bytes;
    ASSIGN_OR_RETURN(const CudaDevicePtr scratch, Scratchpad(source_bytes, flight));
    RETURN_IF_ERROR(
        Check(cuda_.MemcpyHtoDAsync(scratch, source, static_cast<size_t>(source_bytes), stream), "cuMemcpyHtoDAsync"));
    ScatterRuns runs = {.from = scratch,
                        .to = PlaceOf(transfer),
                        .run_elements = transfer.run_elements,
                        .run_count = transfer.run_count,
                        .from_stride_bytes = source_stride_bytes,
                        .stride = transfer.stride,
                        .element_stride = transfer.element_stride,
                        .element_bytes = element};
    const int64_t elements = transfer.run_count * transfer.run_elements;
    ASSIGN_OR_RETURN(const unsigned blocks, scatter_.ChooseBlocks((elements + kScatterThreads - 1) / kScatterThreads));
    flight->behind_copies.emplace_back([this, runs, blocks]() mutable {
      void* parameters[] = {&runs};
      return scatter_.Launch({.grid_blocks = blocks, .block_threads = kScatterThreads}, kernels_, parameters);
    });
    return absl::OkStatus();
  }

  // Pinned memory until the flight has landed.
  absl::StatusOr<std::byte*> Stage(int64_t size_bytes, Flight* flight) {
    std::optional<Staging> piece;
    {
      MutexLock lock(mutex_);
      piece = staging_.Take(size_bytes);
    }
    if (!piece.has_value()) {
      piece = Staging{nullptr, RoundUp(size_bytes)};
      RETURN_IF_ERROR(
          Check(cuda_.MemHostAlloc(static_cast<size_t>(piece->size_bytes), kCudaHostAllocPortable, &piece->address),
                "cuMemHostAlloc"));
    }
    flight->staging.push_back(*piece);
    return static_cast<std::byte*>(piece->address);
  }

  // The same of the device.
  absl::StatusOr<CudaDevicePtr> Scratchpad(int64_t size_bytes, Flight* flight) {
    MutexLock lock(mutex_);
    std::optional<Scratch> piece = scratch_.Take(size_bytes);
    if (!piece.has_value()) {
      ASSIGN_OR_RETURN(piece, CutScratch(RoundUp(size_bytes)));
    }
    flight->scratch.push_back(*piece);
    return piece->address;
  }

  // From the block that was allocated last, or from a new one.
  absl::StatusOr<Scratch> CutScratch(int64_t size_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (uncut_scratch_.size_bytes < size_bytes) {
      Scratch block{0, std::max(size_bytes, kScratchBlockBytes)};
      RETURN_IF_ERROR(Check(cuda_.MemAlloc(static_cast<size_t>(block.size_bytes), &block.address), "cuMemAlloc"));
      scratch_blocks_.push_back(block.address);
      uncut_scratch_ = block;
    }
    const Scratch piece{uncut_scratch_.address, size_bytes};
    uncut_scratch_ = {uncut_scratch_.address + static_cast<CudaDevicePtr>(size_bytes),
                      uncut_scratch_.size_bytes - size_bytes};
    return piece;
  }

  void End(CudaStream stream) {
    (void)cuda_.StreamSynchronize(stream);
    (void)cuda_.StreamDestroy(stream);
  }

  static int64_t RoundUp(int64_t size_bytes) { return RoundUpTo(size_bytes, kStagingGranularityBytes); }

  absl::StatusOr<CudaStream> StreamOfThisThread() {
    MutexLock lock(mutex_);
    CudaStream& stream = streams_[std::this_thread::get_id()];
    if (stream != nullptr) return stream;
    const CudaResult result = cuda_.StreamCreate(kCudaStreamNonBlocking, &stream);
    if (result != kCudaSuccess) {
      streams_.erase(std::this_thread::get_id());
      return Check(result, "cuStreamCreate");
    }
    RETURN_IF_ERROR(Check(cuda_.StreamWaitEvent(stream, cleared_), "cuStreamWaitEvent"));
    return stream;
  }

  absl::Status TakeEvent(CudaEvent* event) {
    {
      MutexLock lock(mutex_);
      if (!events_.empty()) {
        *event = events_.back();
        events_.pop_back();
        return absl::OkStatus();
      }
    }
    return Check(cuda_.EventCreate(kCudaEventDisableTiming, event), "cuEventCreate");
  }

  void Recycle(Flight flight) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (flight.event != nullptr) events_.push_back(flight.event);
    for (const Staging& piece : flight.staging) staging_.Give(piece);
    for (const Scratch& piece : flight.scratch) scratch_.Give(piece);
  }

  const ShardPlan& plan_;
  const std::vector<GpuRange> slabs_;
  const CudaContext context_;
  CudaDriver& cuda_;
  const GpuDigester digester_;
  const GpuKernel scatter_;
  const GpuRunCopier run_copier_;
  const std::optional<GpuQuantizer> quantizer_;  // if the plan has anything to quantize
  const std::function<absl::Status()> once_landed_;

  Mutex kernels_mutex_;  // so that the kernels of a chunk follow its event, and no other's
  Mutex mutex_;
  CudaStream kernels_ = nullptr;            // constant once prepared
  std::unique_ptr<LandedDigests> digests_;  // likewise
  CudaEvent cleared_ = nullptr;             // constant once prepared: behind the clearing of slabs and not_finite_
  CudaDevicePtr not_finite_ = 0;            // likewise: of each tensor, the first element that is not finite, or ~0
  std::map<std::thread::id, CudaStream> streams_ ABSL_GUARDED_BY(mutex_);
  std::multimap<const std::byte*, Flight> flights_ ABSL_GUARDED_BY(mutex_);  // by the start of their chunk
  std::vector<CudaEvent> events_ ABSL_GUARDED_BY(mutex_);                    // that nobody uses
  Pool<void*> staging_ ABSL_GUARDED_BY(mutex_);
  Pool<CudaDevicePtr> scratch_ ABSL_GUARDED_BY(mutex_);
  Scratch uncut_scratch_ ABSL_GUARDED_BY(mutex_);
  std::vector<CudaDevicePtr> scratch_blocks_ ABSL_GUARDED_BY(mutex_);  // as they were allocated
};

}  // namespace

LoadOptions TuneForCuda(LoadOptions options, CudaBuffers& buffers, size_t gpus) {
  options.buffers = &buffers;
  options.memory_chunk_bytes = kCudaMemoryChunkBytes;
  if (options.reader_threads == 0) {
    options.reader_threads = gpus == 2 ? kCudaReaderThreadsForTwo
                                       : std::min(static_cast<int>(gpus) * kCudaReaderThreads, kMostCudaReaderThreads);
  }
  return options;
}

absl::StatusOr<std::unique_ptr<Destination>> MakeCudaDestination(const ShardPlan& plan, std::vector<GpuRange> slabs,
                                                                 const CudaContext& context,
                                                                 std::function<absl::Status()> once_landed,
                                                                 int64_t digest_batch_bytes) {
  ASSIGN_OR_RETURN(GpuDigester digester, GpuDigester::Create(context));
  ASSIGN_OR_RETURN(GpuKernel scatter, GpuKernel::Load(context, ScatterKernelImage(), kScatterKernelName));
  ASSIGN_OR_RETURN(GpuRunCopier run_copier, GpuRunCopier::Create(context));
  std::optional<GpuQuantizer> quantizer;
  if (QuantizesAnything(plan)) {
    ASSIGN_OR_RETURN(quantizer, GpuQuantizer::Create(context));
  }
  auto destination =
      std::make_unique<CudaDestination>(plan, std::move(slabs), context, std::move(digester), std::move(scatter),
                                        std::move(run_copier), std::move(quantizer), std::move(once_landed));
  RETURN_IF_ERROR(destination->Prepare(digest_batch_bytes));
  return destination;
}

}  // namespace weightbroker
