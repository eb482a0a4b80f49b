// Pinned memory that checkpoints are read into on their way to a GPU.
//
//   CudaBuffers buffers;
//   const auto load = PreparedLoad::Create(source, {..., .buffers = &buffers});
//   buffers.Reserve((*load)->buffer_count(), (*load)->buffer_bytes());    // while CUDA makes a context
//   buffers.Pin(context);
//   ... (*load)->Run(destinations, progress) ...
//
// One chunk of a reader thread is read into while another is copied. Pinned for every context of this process. The
// memory lies on huge pages where there are any, and is pinned at once: 192 MiB take 13 ms, of which 6 need a context;
// 32 buffers of 6 MiB, each pinned by the thread that reads into it, took 32 ms, and cuMemHostAlloc 52 for 128 MiB.
// Where no more memory can be pinned, what is missing is ordinary memory, from which copies are slower; that is logged
// once. Allocate is thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/mutex.h"
#include "common/device/cuda_context.h"
#include "common/load/destination.h"

namespace weightbroker {

class CudaBuffers : public BufferSource {
 public:
  CudaBuffers() = default;
  ~CudaBuffers() override;
  CudaBuffers(const CudaBuffers&) = delete;
  CudaBuffers& operator=(const CudaBuffers&) = delete;

  // Takes memory for that many buffers of that size, which Allocate then gives out. MEMORY_EXHAUSTED if there is none.
  absl::Status Reserve(int count, int64_t buffer_bytes);

  // Pins what has been reserved, and from now on whatever has to be allocated besides.
  void Pin(const CudaContext& context);

  absl::StatusOr<std::span<std::byte>> Allocate(int64_t size_bytes) override;
  int chunks_in_flight() const override { return 1; }

  // How much of what was taken could be pinned, and how much could not, or not yet.
  int64_t pinned_bytes() const;
  int64_t unpinned_bytes() const;

 private:
  // Memory taken at once, of which the first part has been given out.
  struct Block {
    std::byte* data = nullptr;
    int64_t size_bytes = 0;
    int64_t buffer_bytes = 0;
    int64_t given_bytes = 0;
    std::vector<std::byte*> pinned;  // where what was pinned at once starts
    int64_t pinned_bytes = 0;        // from the start on
  };

  static absl::StatusOr<Block> Take(int64_t count, int64_t buffer_bytes);
  void PinBlock(Block& block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  CudaResult PinPart(Block& block, int64_t size_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  std::optional<CudaContext> context_ ABSL_GUARDED_BY(mutex_);  // once anything can be pinned
  std::vector<Block> blocks_ ABSL_GUARDED_BY(mutex_);           // only the last may have something to give
  bool has_warned_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace weightbroker
