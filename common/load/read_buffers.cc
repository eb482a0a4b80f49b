#include "common/load/read_buffers.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/file.h"
#include "common/base/status_macros.h"

namespace weightbroker {

absl::StatusOr<std::span<std::byte>> HeapBuffers::Allocate(int64_t size_bytes) {
  MutexLock lock(mutex_);
  if (static_cast<int64_t>(rest_.size()) < size_bytes) {
    ASSIGN_OR_RETURN(rest_, NewBlock(std::max(size_bytes, kBlockBytes)));
  }
  const std::span<std::byte> buffer = rest_.first(static_cast<size_t>(size_bytes));
  rest_ = rest_.subspan(buffer.size());
  return buffer;
}

absl::StatusOr<std::span<std::byte>> HeapBuffers::NewBlock(int64_t size_bytes) {
  const auto size = static_cast<size_t>(size_bytes);
  auto* const data = static_cast<std::byte*>(::operator new(size, kBlockAlignment, std::nothrow));
  if (data == nullptr) {
    return MakeError(Reason::kMemoryExhausted, absl::StrCat("no memory for read buffers of ", size_bytes, " bytes"),
                     {{"need_bytes", absl::StrCat(size_bytes)}});
  }
  madvise(data, size, MADV_HUGEPAGE);  // a wish
  blocks_.emplace_back(data);
  return std::span(data, size);
}

absl::StatusOr<std::span<std::byte>> BufferPool::Take() {
  {
    MutexLock lock(mutex_);
    if (!free_.empty()) {
      const auto buffer = free_.back();
      free_.pop_back();
      return buffer;
    }
    if (allocated_ == count_) {
      return absl::InternalError(absl::StrCat("all of the ", count_, " read buffers that there may be are in use"));
    }
    ++allocated_;
  }
  const auto buffer = source_.Allocate(buffer_bytes_);
  if (buffer.ok()) return buffer;
  MutexLock lock(mutex_);
  --allocated_;
  return buffer.status();
}

void BufferPool::Give(std::span<std::byte> buffer) {
  MutexLock lock(mutex_);
  free_.push_back(buffer);
}

absl::StatusOr<std::span<std::byte>> ReadBuffers::Take() {
  while (stored_.size() > in_flight_) RETURN_IF_ERROR(ReleaseFirst());
  return pool_.Take();
}

absl::Status ReadBuffers::ReleaseAll() {
  absl::Status first;
  while (!stored_.empty()) first.Update(ReleaseFirst());
  return first;
}

absl::Status ReadBuffers::ReleaseFirst() {
  const std::span<std::byte> buffer = stored_.front();
  stored_.pop_front();
  absl::Status first;
  for (const auto& destination : destinations_) first.Update(destination->Release(buffer));
  if (first.ok()) pool_.Give(buffer);
  return first;
}

}  // namespace weightbroker
