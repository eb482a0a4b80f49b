// A sealed, contiguous piece of host memory that holds tensors of one shard and can be mapped by other processes.
//
//   auto slab = HostSlab::Create(bytes);                      // MEMORY_EXHAUSTED: need and have
//   if (!slab.ok()) return slab.status();
//   RETURN_IF_ERROR(slab->Write(0, parts));                   // or Populate, and fill writable_bytes()
//   auto sealed = std::move(*slab).Seal();                    // no writer is left after this
//
// Not thread-safe while writable, but different threads may fill different bytes; immutable and thread-safe once
// sealed. It knows nothing of tensors: see plan/manifest.h.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "common/base/mutex.h"
#include "common/base/unique_fd.h"
#include "common/memory/host_memory.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker {

// A sealed memfd: F_SEAL_SHRINK|GROW|FUTURE_WRITE|SEAL, mode 0400, reopened O_RDONLY. Whoever gets `fd` can map it
// read-only and nothing else.
struct SealedSlab {
  UniqueFd fd;
  int64_t size_bytes = 0;
  v1::PageKind page_kind = v1::PAGE_KIND_BASE;
};

class HostSlab {
 public:
  // Makes room for `size_bytes` (> 0, rounded up to the page size) of zeros. Pages are not there yet: see Populate.
  // Takes the pages that ProbeHostPageKind names. MEMORY_EXHAUSTED, with need and have, if ReadHostMemory says that
  // there is not enough for all of it; nothing is left behind.
  static absl::StatusOr<HostSlab> Create(int64_t size_bytes);

  HostSlab(HostSlab&&) noexcept;
  HostSlab& operator=(HostSlab&&) noexcept;
  ~HostSlab();  // gives the memory back unless sealed

  // Allocates and maps the pages of [offset_bytes, offset_bytes + size_bytes), so that filling them later does not wait
  // for the kernel. Thread-safe. MEMORY_EXHAUSTED if the kernel has none left; a cgroup's limit, where it is met in
  // spite of Create's check, lets the kernel end this process instead.
  absl::Status Populate(int64_t offset_bytes, int64_t size_bytes);

  // Copies `parts`, one after the other, to `offset_bytes` and what follows. Thread-safe for different bytes. It
  // allocates pages as it goes, in the way that is cheapest for them: wherever it can by writing to the memfd, which
  // does not clear and map each of them first. MEMORY_EXHAUSTED as Populate.
  absl::Status Write(int64_t offset_bytes, std::span<const std::span<const std::byte>> parts);

  // Whether Write is faster than Populate followed by a copy into writable_bytes().
  bool PrefersWrite() const { return prefers_write_; }

  std::span<std::byte> writable_bytes() const { return {data_, static_cast<size_t>(size_bytes_)}; }
  int64_t size_bytes() const { return size_bytes_; }
  v1::PageKind page_kind() const { return page_kind_; }

  // Unmaps the writable view and seals. No writable mapping or descriptor is left. The page kind is what was got in
  // fact: transparent huge pages are reported if they hold at least half of the slab.
  absl::StatusOr<SealedSlab> Seal() &&;

 private:
  HostSlab();
  static absl::StatusOr<HostSlab> CreateWith(v1::PageKind page_kind, int64_t size_bytes);
  void Unmap();
  absl::Status WriteToFile(int64_t offset_bytes, std::span<const std::span<const std::byte>> parts);

  // The kernel lets one writer at a time into a file, and makes the others spin: measured with two cores, a lock that
  // sleeps leaves a core to those who read. On the heap, so that a slab can be moved.
  std::unique_ptr<Mutex> write_mutex_;
  UniqueFd fd_;
  std::byte* data_ = nullptr;  // mapped if not null; aligned to huge pages where they are wanted
  int64_t size_bytes_ = 0;
  v1::PageKind page_kind_ = v1::PAGE_KIND_BASE;
  bool prefers_write_ = true;
};

// INVALID_ARGUMENT unless `size_bytes` is positive, MEMORY_EXHAUSTED if there is not that much host memory. Reserved
// huge pages are there already.
absl::Status CheckSlabSize(int64_t size_bytes, v1::PageKind page_kind);

// A memfd with `contents`, sealed against everything and reopened read-only; for manifests and requests between
// processes.
absl::StatusOr<UniqueFd> CreateSealedMemfd(const char* name, std::span<const std::byte> contents);

// Whether `fd` is a memfd of exactly `size_bytes`, open for reading only, with every seal that HostSlab::Seal sets.
// PROTOCOL_ERROR otherwise, saying what is missing: what another process sent is not trusted blindly.
absl::Status CheckSealedMemfd(int fd, int64_t size_bytes);

}  // namespace weightbroker
