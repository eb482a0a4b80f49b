#include "common/load/cuda_buffers.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/memory/host_slab.h"

namespace weightbroker {

CudaBuffers::~CudaBuffers() {
  const CudaScope current(context_);
  for (const Buffer& buffer : buffers_) {
    if (buffer.is_pinned) (void)context_.driver().MemHostUnregister(buffer.data);
    std::free(buffer.data);
  }
}

int64_t CudaBuffers::SizeOf(int64_t size_bytes) const {
  return (size_bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
}

absl::StatusOr<std::span<std::byte>> CudaBuffers::Allocate(int64_t size_bytes) {
  Buffer buffer;
  buffer.size_bytes = SizeOf(size_bytes);
  const auto size = static_cast<size_t>(buffer.size_bytes);
  buffer.data = std::aligned_alloc(kHugePageBytes, size);
  if (buffer.data == nullptr) {
    return MakeError(Reason::kMemoryExhausted, absl::StrCat("no memory for a read buffer of ", size_bytes, " bytes"),
                     {{"need_bytes", absl::StrCat(size_bytes)}});
  }
  madvise(buffer.data, size, MADV_HUGEPAGE);  // a wish
  buffer.is_pinned = Pin(buffer);
  MutexLock lock(mutex_);
  buffers_.push_back(buffer);
  return std::span(static_cast<std::byte*>(buffer.data), static_cast<size_t>(size_bytes));
}

bool CudaBuffers::Pin(const Buffer& buffer) {
  const CudaScope current(context_);
  if (!current.status().ok()) return false;
  CudaDriver& cuda = context_.driver();
  const CudaResult result =
      cuda.MemHostRegister(buffer.data, static_cast<size_t>(buffer.size_bytes), kCudaHostRegisterPortable);
  if (result == kCudaSuccess) return true;
  MutexLock lock(mutex_);
  if (!std::exchange(has_warned_, true)) {
    Log(LogLevel::kWarning, "load.not_pinned",
        {{"bytes", absl::StrCat(buffer.size_bytes)}, {"error", cuda.ErrorName(result)}});
  }
  return false;
}

int64_t CudaBuffers::SumOf(bool pinned) const {
  MutexLock lock(mutex_);
  int64_t sum = 0;
  for (const Buffer& buffer : buffers_) sum += buffer.is_pinned == pinned ? buffer.size_bytes : 0;
  return sum;
}

int64_t CudaBuffers::pinned_bytes() const { return SumOf(true); }
int64_t CudaBuffers::unpinned_bytes() const { return SumOf(false); }

}  // namespace weightbroker
