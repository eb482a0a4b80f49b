// The buffers that files are read into. As few of them as can be are used, and those again and again: what was used
// last is in caches yet, and a virtual disk, whose host copies into it, read 3.1 GB/s into 8 MiB and 2.6 into 32.
//
//   BufferPool pool(source, buffer_bytes, /*count=*/16);                    // of all reader threads
//   ReadBuffers buffers(pool, /*in_flight=*/1, destinations);               // of each of them
//   ASSIGN_OR_RETURN(const std::span<std::byte> buffer, buffers.Take());
//   ... read into it, and store it ...
//   buffers.Stored(buffer);                                               // or Unused, if nothing was
//   RETURN_IF_ERROR(buffers.ReleaseAll());                                  // also after an error, before they go
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/mutex.h"
#include "common/load/destination.h"
#include "common/memory/host_memory.h"

namespace weightbroker {

// Memory that O_DIRECT can read into, on huge pages where there are any, also if several share one: with base pages the
// kernel must split a read into many requests, and reading took twice as long (2 GiB in 1.6 s and in 0.75 s on a
// virtual disk).
class HeapBuffers : public BufferSource {
 public:
  absl::StatusOr<std::span<std::byte>> Allocate(int64_t size_bytes) override;

 private:
  static constexpr std::align_val_t kBlockAlignment{kHugePageBytes};
  static constexpr int64_t kBlockBytes = 16 << 20;  // of which pages are there once they are read into
  struct Deleter {
    void operator()(std::byte* data) const { ::operator delete(data, kBlockAlignment); }
  };

  absl::StatusOr<std::span<std::byte>> NewBlock(int64_t size_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;
  std::vector<std::unique_ptr<std::byte, Deleter>> blocks_ ABSL_GUARDED_BY(mutex_);
  std::span<std::byte> rest_ ABSL_GUARDED_BY(mutex_);  // of the last
};

// Buffers that nobody uses, the one used last first. Thread-safe.
class BufferPool {
 public:
  // At most `count` are out at a time. `source` must outlive the pool.
  BufferPool(BufferSource& source, int64_t buffer_bytes, int64_t count)
      : source_(source), buffer_bytes_(buffer_bytes), count_(count) {}

  // Allocates one where none is free. As BufferSource::Allocate; INTERNAL if `count` are out.
  absl::StatusOr<std::span<std::byte>> Take();
  void Give(std::span<std::byte> buffer);

 private:
  BufferSource& source_;
  const int64_t buffer_bytes_;
  const int64_t count_;

  Mutex mutex_;
  std::vector<std::span<std::byte>> free_ ABSL_GUARDED_BY(mutex_);  // the one used last at the end
  int64_t allocated_ ABSL_GUARDED_BY(mutex_) = 0;
};

// What one reader thread has of the pool. Not thread-safe.
class ReadBuffers {
 public:
  // `in_flight` of those that have been stored may still be needed by destinations when the next is taken. Pool and
  // destinations outlive the object.
  ReadBuffers(BufferPool& pool, int in_flight, std::span<const std::unique_ptr<Destination>> destinations)
      : pool_(pool), in_flight_(static_cast<size_t>(in_flight)), destinations_(destinations) {}

  // To read into; it is Stored or Unused later. As BufferPool::Take, or what a destination says.
  absl::StatusOr<std::span<std::byte>> Take();

  // The destinations have been told to store what was read into it.
  void Stored(std::span<std::byte> buffer) { stored_.push_back(buffer); }

  // Nothing of it was given to a destination.
  void Unused(std::span<std::byte> buffer) { pool_.Give(buffer); }

  // Waits until no destination needs any that was stored. One whose release fails is never used again.
  absl::Status ReleaseAll();

 private:
  absl::Status ReleaseFirst();

  BufferPool& pool_;
  const size_t in_flight_;
  const std::span<const std::unique_ptr<Destination>> destinations_;
  std::deque<std::span<std::byte>> stored_;  // in that order
};

}  // namespace weightbroker
