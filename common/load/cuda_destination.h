// A rank's shard in GPU memory, as a load fills it: copies from pinned chunks on a stream of each reader thread, and
// digests taken on the GPU from what has landed.
//
//   CudaBuffers buffers;                                            // for TuneForCuda
//   auto destination = MakeCudaDestination(plan.shards[0], slabs, context);
//   if (!destination.ok()) return destination.status();             // the kernels do not run on this GPU
//
// Buffers and memory are still the caller's, and must outlive the destination. Weights are quantized on the GPU, behind
// the copies, to the same bytes as in host memory; what is converted is made on the CPU, by the same code.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/device/cuda_context.h"
#include "common/device/gpu_digest.h"
#include "common/load/cuda_buffers.h"
#include "common/load/destination.h"
#include "common/load/landed_digests.h"
#include "common/load/load_engine.h"

namespace weightbroker {

// Reader threads and chunks with which 30 GiB came from tmpfs to an H200 fastest: 50.6 GB/s with 12 threads, 49.7 with
// 14 and 49.6 with 16, whose buffers leave less of the caches; 10 were as fast as 12. Chunks of 3 MiB were as fast as
// those of 4, and 1, 2 and 8 slower. To two GPUs only 16 threads have been measured; to four 16, 32 and 48, which came
// to 47 to 73, 59 to 68 and 63 to 71 GB/s, with medians of 48, 63 and 70.
inline constexpr int kCudaReaderThreads = 12;  // for each GPU
inline constexpr int kCudaReaderThreadsForTwo = 16;
inline constexpr int kMostCudaReaderThreads = 48;
inline constexpr int64_t kCudaMemoryChunkBytes = 4 << 20;  // LoadOptions::memory_chunk_bytes

// `options` with what they leave open as it suits so many GPUs, reading into `buffers`, which must outlive the load.
LoadOptions TuneForCuda(LoadOptions options, CudaBuffers& buffers, size_t gpus);

// `slabs` are where the plan's slabs can be written, in the context, and as long as they were allocated: they are
// filled with zeros first, behind which everything else waits on the GPU, and nobody on the host. `once_landed` is
// called once everything has landed and the device is synchronized: the place to take away the right to write. Tensors
// that have landed whole are digested as soon as they come to `digest_batch_bytes`.
absl::StatusOr<std::unique_ptr<Destination>> MakeCudaDestination(
    const ShardPlan& plan, std::vector<GpuRange> slabs, const CudaContext& context,
    std::function<absl::Status()> once_landed = [] { return absl::OkStatus(); },
    int64_t digest_batch_bytes = LandedDigests::kBatchBytes);

}  // namespace weightbroker
