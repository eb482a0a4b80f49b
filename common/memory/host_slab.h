// A sealed, contiguous piece of host memory that holds tensors of one shard and can be mapped by other processes.
//
//   auto slab = HostSlab::Create(bytes);                      // MEMORY_EXHAUSTED: need and have
//   if (!slab.ok()) return slab.status();
//   RETURN_IF_ERROR(ReadInto(file, slab->writable_bytes()));
//   auto sealed = std::move(*slab).Seal();                    // no writer is left after this
//
// Not thread-safe while writable, but different threads may fill different bytes; immutable and thread-safe once sealed.
// It knows nothing of tensors: see plan/manifest.h.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"
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
  // Makes room for `size_bytes` (> 0, rounded up to the page size) of zeros. Pages are not there yet: see Populate. Takes
  // reserved huge pages if there are enough, else transparent ones where the system allows them for shared memory.
  static absl::StatusOr<HostSlab> Create(int64_t size_bytes);

  HostSlab(HostSlab&&) noexcept;
  HostSlab& operator=(HostSlab&&) noexcept;
  ~HostSlab();  // gives the memory back unless sealed

  // Allocates the pages of [offset_bytes, offset_bytes + size_bytes), as fallocate does, so that filling them later does
  // not wait for the kernel. Thread-safe. MEMORY_EXHAUSTED if memory or the cgroup do not allow it.
  absl::Status Populate(int64_t offset_bytes, int64_t size_bytes);

  std::span<std::byte> writable_bytes() const { return {data_, static_cast<size_t>(size_bytes_)}; }
  int64_t size_bytes() const { return size_bytes_; }
  v1::PageKind page_kind() const { return page_kind_; }

  // Unmaps the writable view and seals. No writable mapping or descriptor is left.
  absl::StatusOr<SealedSlab> Seal() &&;

 private:
  HostSlab() = default;

  UniqueFd fd_;
  std::byte* data_ = nullptr;
  int64_t size_bytes_ = 0;
  v1::PageKind page_kind_ = v1::PAGE_KIND_BASE;
};

// A memfd with `contents`, sealed against everything and reopened read-only; for manifests and requests between processes.
absl::StatusOr<UniqueFd> CreateSealedMemfd(const char* name, std::span<const std::byte> contents);

// Whether `fd` is a memfd of exactly `size_bytes` with every seal that HostSlab::Seal sets. PROTOCOL_ERROR otherwise,
// saying what is missing: what another process sent is not trusted blindly.
absl::Status CheckSealedMemfd(int fd, int64_t size_bytes);

// What pages a new slab of `size_bytes` would get now.
v1::PageKind ProbeHostPageKind(int64_t size_bytes);

struct HostMemory {
  int64_t available_bytes = 0;  // the least of MemAvailable and what each cgroup above this process still allows
  const char* limited_by = "";  // "machine" or "cgroup"
};

// How much memory a new slab could take. Reads /proc/meminfo and the memory controllers of cgroup v1 and v2.
HostMemory ReadHostMemory();

}  // namespace weightbroker
