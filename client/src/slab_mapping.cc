#include "client/src/slab_mapping.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/thread.h"
#include "common/memory/host_slab.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14
#endif

namespace weightbroker::client {

absl::StatusOr<SlabMapping> SlabMapping::Map(int fd, int64_t size_bytes) {
  RETURN_IF_ERROR(CheckSealedMemfd(fd, size_bytes));
  void* data = mmap(nullptr, static_cast<size_t>(size_bytes), PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return SystemError(absl::StrCat("mapping a slab of ", size_bytes, " bytes"), errno);
  return SlabMapping(static_cast<const std::byte*>(data), size_bytes);
}

SlabMapping::SlabMapping(SlabMapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_bytes_(std::exchange(other.size_bytes_, 0)) {}

SlabMapping& SlabMapping::operator=(SlabMapping&& other) noexcept {
  if (this != &other) {
    Unmap();
    data_ = std::exchange(other.data_, nullptr);
    size_bytes_ = std::exchange(other.size_bytes_, 0);
  }
  return *this;
}

SlabMapping::~SlabMapping() { Unmap(); }

void SlabMapping::Unmap() {
  if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), static_cast<size_t>(size_bytes_));
}

void SlabMapping::Prefault(int threads) const {
  constexpr int64_t kGranuleBytes = 2 << 20;  // a huge page, so that no two threads fault the same one
  const int64_t granules = (size_bytes_ + kGranuleBytes - 1) / kGranuleBytes;
  const int64_t granules_each = (granules + threads - 1) / threads;
  std::vector<std::thread> workers;
  for (int64_t first = 0; first < granules; first += granules_each) {
    const int64_t begin = first * kGranuleBytes;
    const int64_t end = std::min(size_bytes_, (first + granules_each) * kGranuleBytes);
    const auto populate = [this, begin, end] {
      madvise(const_cast<std::byte*>(data_) + begin, static_cast<size_t>(end - begin), MADV_POPULATE_READ);
    };
    auto worker = StartThread("touching pages", populate);
    if (worker.ok()) {
      workers.push_back(*std::move(worker));
    } else {
      populate();
    }
  }
  for (std::thread& worker : workers) worker.join();
}

int ChooseThreads(int requested) {
  if (requested > 0) return requested;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return 1;
  return std::clamp(CPU_COUNT(&allowed), 1, 16);
}

}  // namespace weightbroker::client
