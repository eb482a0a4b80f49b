#include "server/loader/scrub_memory.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

constexpr int64_t kPieceBytes = 4 << 20;  // a multiple of a word; between two of them a cap can make it wait

class Mapping {
 public:
  Mapping(const std::byte* data, size_t size) : data_(data), size_(size) {}
  Mapping(Mapping&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}
  Mapping& operator=(Mapping&&) = delete;
  ~Mapping() {
    if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), size_);
  }

  const std::byte* data() const { return data_; }

 private:
  const std::byte* data_;
  const size_t size_;
};

// A shorter one would end this process with SIGBUS.
absl::StatusOr<Mapping> MapSlab(int fd, int64_t size_bytes) {
  struct stat status = {};
  if (fstat(fd, &status) != 0) return SystemError("looking at a slab that is to be read", errno);
  if (size_bytes <= 0 || status.st_size < size_bytes) {
    return MakeError(Reason::kProtocolError,
                     absl::StrCat("a slab has ", status.st_size, " bytes where ", size_bytes, " are to be read"));
  }
  const auto size = static_cast<size_t>(size_bytes);
  void* const data = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return SystemError("mapping a slab that is to be read", errno);
  return Mapping(static_cast<const std::byte*>(data), size);
}

class HostScrubMemory : public ScrubMemory {
 public:
  explicit HostScrubMemory(std::vector<Mapping> slabs) : slabs_(std::move(slabs)) {}

  absl::StatusOr<Digest> DigestOf(const v1::Tensor& row, const OnRead& on_read) override {
    const std::byte* const data = slabs_[static_cast<size_t>(row.slab())].data() + row.offset_bytes();
    DigestAccumulator sum;
    for (int64_t offset = 0; offset < row.size_bytes(); offset += kPieceBytes) {
      const int64_t bytes = std::min(kPieceBytes, row.size_bytes() - offset);
      sum.Add(offset, {data + offset, static_cast<size_t>(bytes)});
      RETURN_IF_ERROR(on_read(bytes));
    }
    return sum.Finish(row.size_bytes());
  }

 private:
  const std::vector<Mapping> slabs_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ScrubMemory>> ScrubMemory::Map(const internal::v1::LoadRequest& request,
                                                              std::span<const UniqueFd> fds,
                                                              const CudaOpener& open_cuda) {
  const auto& slabs = request.scrub().slabs();
  const bool has_fds = request.handle_kind() != v1::HANDLE_KIND_CUDA_IPC;
  if (request.ranks_size() != 1 || fds.size() != (has_fds ? static_cast<size_t>(slabs.size()) : 0)) {
    return MakeError(Reason::kProtocolError,
                     absl::StrCat("the broker asked for a scrub of ", slabs.size(), " slabs of ", request.ranks_size(),
                                  " ranks with ", fds.size(), " descriptors of them"));
  }
  if (request.handle_kind() != v1::HANDLE_KIND_HOST_MEMFD) {
    ASSIGN_OR_RETURN(CudaDriver* const cuda, open_cuda());
    return MapGpuForScrub(request, fds, *cuda);
  }
  std::vector<Mapping> mapped;
  for (int i = 0; i < slabs.size(); ++i) {
    ASSIGN_OR_RETURN(Mapping mapping, MapSlab(fds[static_cast<size_t>(i)].get(), slabs[i].size_bytes()));
    mapped.push_back(std::move(mapping));
  }
  return std::make_unique<HostScrubMemory>(std::move(mapped));
}

}  // namespace weightbroker
