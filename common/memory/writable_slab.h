// A piece of host memory that another process fills before it is sealed: what a publisher gets.
//
//   ASSIGN_OR_RETURN(WritableSlab slab, WritableSlab::Create(bytes));        // MEMORY_EXHAUSTED: need and have
//   ... send slab.fd() to whoever fills it ...
//   RETURN_IF_ERROR(slab.Seal());                             // STILL_WRITABLE while anybody has it mapped writable
//   ASSIGN_OR_RETURN(SealedSlab sealed, std::move(slab).Finish());
//
// Its length is fixed from the start: nobody can cut it off under a reader. Not thread-safe.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"
#include "common/memory/host_slab.h"

namespace weightbroker {

class WritableSlab {
 public:
  // Makes room for `size_bytes` (> 0, rounded up to the page size) of zeros, in pages as HostSlab takes them; pages are
  // there when they have been written to. MEMORY_EXHAUSTED as HostSlab::Create.
  static absl::StatusOr<WritableSlab> Create(int64_t size_bytes);

  // Open for reading and writing.
  int fd() const { return fd_.get(); }
  int64_t size_bytes() const { return size_bytes_; }
  v1::PageKind page_kind() const { return page_kind_; }

  // How much of it has pages.
  int64_t filled_bytes() const;

  // Takes the right to write from everyone who holds a descriptor of it. STILL_WRITABLE, with nothing changed, while a
  // process has it mapped writable or the kernel has pages of it pinned for direct I/O; SYSTEM_ERROR otherwise.
  // Harmless twice.
  absl::Status Seal();

  // The slab as others get it. Only once it is sealed.
  absl::StatusOr<SealedSlab> Finish() &&;

 private:
  UniqueFd fd_;
  int64_t size_bytes_ = 0;
  v1::PageKind page_kind_ = v1::PAGE_KIND_BASE;
  bool sealed_ = false;
};

// Whether `fd` is a memfd of exactly `size_bytes`, open for writing, whose length nobody can change. PROTOCOL_ERROR
// otherwise: what another process sent is not trusted blindly.
absl::Status CheckWritableMemfd(int fd, int64_t size_bytes);

}  // namespace weightbroker
