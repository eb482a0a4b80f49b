// A reader thread's buffers, used in turn.
//
//   BufferRing ring(source, buffer_bytes, /*count=*/3, destinations);
//   ASSIGN_OR_RETURN(const std::span<std::byte> buffer, ring.Next());   // no destination needs it any more
//   ...
//   RETURN_IF_ERROR(ring.ReleaseAll());                                 // also after an error, before the ring goes
//
// For one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/mutex.h"
#include "common/load/destination.h"

namespace weightbroker {

// Memory that O_DIRECT can read into, on huge pages where there are any: with base pages the kernel must split a read
// into many requests, and reading took twice as long (2 GiB in 1.6 s and in 0.75 s on a virtual disk).
class HeapBuffers : public BufferSource {
 public:
  absl::StatusOr<std::span<std::byte>> Allocate(int64_t size_bytes) override;

 private:
  struct Deleter {
    std::align_val_t alignment;
    void operator()(std::byte* data) const { ::operator delete(data, alignment); }
  };

  Mutex mutex_;
  std::vector<std::unique_ptr<std::byte, Deleter>> buffers_ ABSL_GUARDED_BY(mutex_);
};

class BufferRing {
 public:
  // Buffers are allocated when they are first needed. All must outlive the ring.
  BufferRing(BufferSource& source, int64_t buffer_bytes, int count,
             std::span<const std::unique_ptr<Destination>> destinations)
      : source_(source), buffer_bytes_(buffer_bytes), count_(static_cast<size_t>(count)), destinations_(destinations) {}

  // The one that has not been used for longest, once no destination needs it.
  absl::StatusOr<std::span<std::byte>> Next();

  // Waits until no destination needs any of them.
  absl::Status ReleaseAll();

 private:
  absl::Status Release(std::span<const std::byte> buffer);

  BufferSource& source_;
  const int64_t buffer_bytes_;
  const size_t count_;
  const std::span<const std::unique_ptr<Destination>> destinations_;
  std::vector<std::span<std::byte>> buffers_;  // the one used last at the end
};

}  // namespace weightbroker
