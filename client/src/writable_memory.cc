#include "client/src/writable_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/memory/writable_slab.h"

namespace weightbroker::client {
namespace {

// A memfd mapped for writing.
class Mapping {
 public:
  // PROTOCOL_ERROR unless `fd` is a memfd of that length that nobody can shrink; SYSTEM_ERROR.
  static absl::StatusOr<Mapping> Map(int fd, const v1::Slab& slab) {
    RETURN_IF_ERROR(CheckWritableMemfd(fd, slab.size_bytes()));
    const auto size = static_cast<size_t>(slab.size_bytes());
    void* const data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) return SystemError("mmap of a slab", errno);
    // A child that is forked meanwhile must not keep the memory writable.
    if (madvise(data, size, MADV_DONTFORK) != 0) {
      const int error_number = errno;
      munmap(data, size);
      return SystemError("madvise(MADV_DONTFORK)", error_number);
    }
    // A wish: what is written through this mapping is what the pages are allocated for.
    if (slab.page_kind() == v1::PAGE_KIND_TRANSPARENT_HUGE) madvise(data, size, MADV_HUGEPAGE);
    return Mapping({static_cast<std::byte*>(data), slab.size_bytes()});
  }

  Mapping(Mapping&& other) noexcept : slab_(std::exchange(other.slab_, {})) {}
  Mapping& operator=(Mapping&&) = delete;
  ~Mapping() {
    if (slab_.data != nullptr) munmap(slab_.data, static_cast<size_t>(slab_.size_bytes));
  }

  const WritableView& slab() const { return slab_; }

 private:
  explicit Mapping(WritableView slab) : slab_(slab) {}

  WritableView slab_;
};

class HostWritableMemory : public WritableMemory {
 public:
  absl::Status Add(std::span<const v1::Slab> slabs, std::span<const UniqueFd> fds) override {
    if (fds.size() != slabs.size()) {
      return MakeError(Reason::kProtocolError, "the service gave a publisher host memory without descriptors");
    }
    std::vector<Mapping> made;
    for (size_t i = 0; i < slabs.size(); ++i) {
      ASSIGN_OR_RETURN(Mapping mapping, Mapping::Map(fds[i].get(), slabs[i]));
      made.push_back(std::move(mapping));
    }
    for (const Mapping& mapping : made) slabs_.push_back(mapping.slab());
    std::move(made.begin(), made.end(), std::back_inserter(mappings_));
    return absl::OkStatus();
  }

  absl::Status Copy(std::byte* to, const void* from, int64_t size_bytes) override {
    memcpy(to, from, static_cast<size_t>(size_bytes));
    return absl::OkStatus();
  }

 private:
  std::vector<Mapping> mappings_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<WritableMemory>> WritableMemory::Open(const EngineDevice& engine) {
  if (engine.is_host()) return std::make_unique<HostWritableMemory>();
  return OpenGpuWritableMemory(engine);
}

}  // namespace weightbroker::client
