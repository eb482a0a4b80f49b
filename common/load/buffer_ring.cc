#include "common/load/buffer_ring.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/file.h"
#include "common/base/status_macros.h"
#include "common/memory/host_slab.h"

namespace weightbroker {

absl::StatusOr<std::span<std::byte>> HeapBuffers::Allocate(int64_t size_bytes) {
  const std::align_val_t alignment{
      static_cast<size_t>(size_bytes >= kHugePageBytes ? kHugePageBytes : kDirectAlignmentBytes)};
  const auto size = static_cast<size_t>(size_bytes);
  auto* const data = static_cast<std::byte*>(::operator new(size, alignment, std::nothrow));
  if (data == nullptr) {
    return MakeError(Reason::kMemoryExhausted, absl::StrCat("no memory for a read buffer of ", size_bytes, " bytes"),
                     {{"need_bytes", absl::StrCat(size_bytes)}});
  }
  if (size_bytes >= kHugePageBytes) madvise(data, size, MADV_HUGEPAGE);  // a wish
  MutexLock lock(mutex_);
  buffers_.emplace_back(data, Deleter{alignment});
  return std::span(data, size);
}

absl::StatusOr<std::span<std::byte>> BufferRing::Next() {
  if (buffers_.size() < count_) {
    ASSIGN_OR_RETURN(buffers_.emplace_back(), source_.Allocate(buffer_bytes_));
    return buffers_.back();
  }
  std::rotate(buffers_.begin(), buffers_.begin() + 1, buffers_.end());
  RETURN_IF_ERROR(Release(buffers_.back()));
  return buffers_.back();
}

absl::Status BufferRing::ReleaseAll() {
  absl::Status first;
  for (const auto buffer : buffers_) first.Update(Release(buffer));
  return first;
}

absl::Status BufferRing::Release(std::span<const std::byte> buffer) {
  absl::Status first;
  for (const auto& destination : destinations_) first.Update(destination->Release(buffer));
  return first;
}

}  // namespace weightbroker
