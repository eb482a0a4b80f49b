#include "common/load/cuda_buffers.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/memory/huge_pages.h"

namespace weightbroker {
namespace {

// Has the kernel make the pages, which pinning would otherwise wait for.
void Touch(std::byte* data, int64_t size_bytes) {
  for (int64_t at = 0; at < size_bytes; at += kDirectAlignmentBytes) {
    *static_cast<volatile std::byte*>(data + at) = std::byte{0};
  }
}

}  // namespace

CudaBuffers::~CudaBuffers() {
  MutexLock lock(mutex_);
  std::optional<CudaScope> current;
  if (context_.has_value()) current.emplace(*context_);
  for (const Block& block : blocks_) {
    for (std::byte* const part : block.pinned) (void)context_->driver().MemHostUnregister(part);
    std::free(block.data);
  }
}

absl::StatusOr<CudaBuffers::Block> CudaBuffers::Take(int64_t count, int64_t buffer_bytes) {
  Block block;
  block.size_bytes = RoundUpToHugePages(count * buffer_bytes);
  block.buffer_bytes = buffer_bytes;
  block.data = static_cast<std::byte*>(std::aligned_alloc(kHugePageBytes, static_cast<size_t>(block.size_bytes)));
  if (block.data == nullptr) {
    return MakeError(Reason::kMemoryExhausted,
                     absl::StrCat("no memory for ", count, " read buffers of ", buffer_bytes, " bytes"),
                     {{"need_bytes", absl::StrCat(block.size_bytes)}});
  }
  madvise(block.data, static_cast<size_t>(block.size_bytes), MADV_HUGEPAGE);  // a wish
  Touch(block.data, block.size_bytes);
  return block;
}

absl::Status CudaBuffers::Reserve(int count, int64_t buffer_bytes) {
  ASSIGN_OR_RETURN(Block block, Take(count, buffer_bytes));
  MutexLock lock(mutex_);
  blocks_.push_back(std::move(block));
  return absl::OkStatus();
}

void CudaBuffers::Pin(const CudaContext& context) {
  MutexLock lock(mutex_);
  context_ = context;
  for (Block& block : blocks_) PinBlock(block);
}

CudaResult CudaBuffers::PinPart(Block& block, int64_t size_bytes) {
  std::byte* const part = block.data + block.pinned_bytes;
  const CudaResult result =
      context_->driver().MemHostRegister(part, static_cast<size_t>(size_bytes), kCudaHostRegisterPortable);
  if (result != kCudaSuccess) return result;
  block.pinned.push_back(part);
  block.pinned_bytes += size_bytes;
  return result;
}

// At once, or else as many buffers as can be.
void CudaBuffers::PinBlock(Block& block) {
  const CudaScope current(*context_);
  if (!current.status().ok()) return;
  CudaResult result = PinPart(block, block.size_bytes);
  if (result == kCudaSuccess) return;
  do {
    result = PinPart(block, std::min(block.buffer_bytes, block.size_bytes - block.pinned_bytes));
  } while (result == kCudaSuccess && block.pinned_bytes < block.size_bytes);
  if (result == kCudaSuccess || std::exchange(has_warned_, true)) return;
  Log(LogLevel::kWarning, "load.not_pinned",
      {{"bytes", absl::StrCat(block.size_bytes - block.pinned_bytes)},
       {"error", context_->driver().ErrorName(result)}});
}

absl::StatusOr<std::span<std::byte>> CudaBuffers::Allocate(int64_t size_bytes) {
  MutexLock lock(mutex_);
  const bool fits = !blocks_.empty() && blocks_.back().size_bytes - blocks_.back().given_bytes >= size_bytes;
  if (!fits) {
    ASSIGN_OR_RETURN(Block block, Take(1, size_bytes));
    if (context_.has_value()) PinBlock(block);
    blocks_.push_back(std::move(block));
  }
  Block& block = blocks_.back();
  const std::span buffer(block.data + block.given_bytes, static_cast<size_t>(size_bytes));
  block.given_bytes += size_bytes;
  return buffer;
}

int64_t CudaBuffers::pinned_bytes() const {
  MutexLock lock(mutex_);
  int64_t sum = 0;
  for (const Block& block : blocks_) sum += block.pinned_bytes;
  return sum;
}

int64_t CudaBuffers::unpinned_bytes() const {
  MutexLock lock(mutex_);
  int64_t sum = 0;
  for (const Block& block : blocks_) sum += block.size_bytes - block.pinned_bytes;
  return sum;
}

}  // namespace weightbroker
