// A rank's shard in GPU memory, as a load fills it: copies from pinned chunks on a stream of each reader thread, and
// digests taken on the GPU from what has landed.
//
//   CudaBuffers buffers(context);                                   // LoadOptions::buffers
//   auto destination = MakeCudaDestination(plan.shards[0], slab_addresses, context);
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
#include "common/base/mutex.h"
#include "common/device/cuda_context.h"
#include "common/load/destination.h"

namespace weightbroker {

// Reader threads and chunks with which tmpfs came to a GPU fastest: 52 GB/s; with chunks of 16 MiB it was 38.
inline constexpr int kCudaReaderThreads = 16;
inline constexpr int64_t kCudaChunkBytes = 4 << 20;

// Pinned memory for reading into, two chunks a thread: one is read into while the other is copied. Pinned for every
// context of this process. Pinning takes a third of a second a GiB, so it is done once for each chunk.
class CudaBuffers : public BufferSource {
 public:
  explicit CudaBuffers(CudaContext context) : context_(std::move(context)) {}
  ~CudaBuffers() override;
  CudaBuffers(const CudaBuffers&) = delete;
  CudaBuffers& operator=(const CudaBuffers&) = delete;

  absl::StatusOr<std::span<std::byte>> Allocate(int64_t size_bytes) override;
  int chunks_in_flight() const override { return 1; }

 private:
  const CudaContext context_;
  Mutex mutex_;
  std::vector<void*> buffers_ ABSL_GUARDED_BY(mutex_);
};

// `slabs` are the addresses at which the plan's slabs can be written, in the context; all zeros. `before_digests` is
// called once everything has landed and the device is synchronized: the place to take away the right to write.
absl::StatusOr<std::unique_ptr<Destination>> MakeCudaDestination(
    const ShardPlan& plan, std::vector<CudaDevicePtr> slabs, const CudaContext& context,
    std::function<absl::Status()> before_digests = [] { return absl::OkStatus(); });

}  // namespace weightbroker
