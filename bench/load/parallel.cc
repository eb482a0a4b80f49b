#include "bench/load/parallel.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "common/base/status_macros.h"
#include "common/memory/huge_pages.h"

namespace weightbroker::bench {
namespace {

constexpr std::align_val_t kAlignment{kHugePageBytes};

}  // namespace

int CoreCount() { return static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); }

void Buffers::Deleter::operator()(std::byte* data) const { ::operator delete(data, kAlignment); }

Buffers::Buffers(const BufferShape& shape) : count_(shape.count), size_bytes_(shape.size_bytes) {
  const auto size = static_cast<size_t>(RoundUpToHugePages(count_ * size_bytes_));
  memory_.reset(static_cast<std::byte*>(::operator new(size, kAlignment)));
  madvise(memory_.get(), size, shape.huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  std::memset(memory_.get(), 0x5A, size);
}

absl::Status ForEachInParallel(int64_t count, const Buffers& buffers,
                               const std::function<absl::Status(int64_t, std::span<std::byte>)>& body) {
  std::atomic<int64_t> next{0};
  std::vector<absl::Status> results(static_cast<size_t>(buffers.count()));
  std::vector<std::thread> workers;
  for (int w = 0; w < buffers.count(); ++w) {
    workers.emplace_back([&, w] {
      absl::Status& result = results[static_cast<size_t>(w)];
      for (int64_t i = next++; i < count && result.ok(); i = next++) result = body(i, buffers[w]);
    });
  }
  for (std::thread& worker : workers) worker.join();
  for (const absl::Status& result : results) RETURN_IF_ERROR(result);
  return absl::OkStatus();
}

}  // namespace weightbroker::bench
