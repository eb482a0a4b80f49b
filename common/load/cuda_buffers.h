// Pinned memory that checkpoints are read into on their way to a GPU.
//
//   CudaBuffers buffers(context);
//   options.buffers = &buffers;                       // LoadOptions
//
// One chunk of a reader thread is read into while another is copied. Pinned for every context of this process. The
// memory lies on huge pages where there are any: 128 MiB are there and pinned in 10 ms, for which cuMemHostAlloc
// takes 52. Where no more memory can be pinned, what is missing is ordinary memory, from which copies are slower; that
// is logged once. Thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/mutex.h"
#include "common/device/cuda_context.h"
#include "common/load/destination.h"

namespace weightbroker {

class CudaBuffers : public BufferSource {
 public:
  explicit CudaBuffers(CudaContext context) : context_(std::move(context)) {}
  ~CudaBuffers() override;
  CudaBuffers(const CudaBuffers&) = delete;
  CudaBuffers& operator=(const CudaBuffers&) = delete;

  absl::StatusOr<std::span<std::byte>> Allocate(int64_t size_bytes) override;
  int64_t SizeOf(int64_t size_bytes) const override;  // whole huge pages
  int chunks_in_flight() const override { return 1; }

  // How much of what was allocated could be pinned, and how much could not.
  int64_t pinned_bytes() const;
  int64_t unpinned_bytes() const;

 private:
  struct Buffer {
    void* data = nullptr;
    int64_t size_bytes = 0;
    bool is_pinned = false;
  };

  bool Pin(const Buffer& buffer);
  int64_t SumOf(bool pinned) const;

  const CudaContext context_;
  mutable Mutex mutex_;
  std::vector<Buffer> buffers_ ABSL_GUARDED_BY(mutex_);
  bool has_warned_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace weightbroker
