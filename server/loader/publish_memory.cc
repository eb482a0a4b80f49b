#include "server/loader/publish_memory.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <iterator>
#include <thread>
#include <utility>

#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/memory/writable_slab.h"
#include "common/publish/digest_tensors.h"
#include "server/loader/hand_over.h"

namespace weightbroker {
namespace {

constexpr int kMaxDigestThreads = 16;

// A sealed slab, mapped to be digested.
class ReadMapping {
 public:
  ReadMapping() = default;
  ReadMapping(ReadMapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  ReadMapping& operator=(ReadMapping&&) = delete;
  ~ReadMapping() {
    if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  }

  static absl::StatusOr<ReadMapping> Map(const WritableSlab& slab) {
    const auto size = static_cast<size_t>(slab.size_bytes());
    void* const data = mmap(nullptr, size, PROT_READ, MAP_SHARED, slab.fd(), 0);
    if (data == MAP_FAILED) return SystemError("mmap of a slab", errno);
    ReadMapping mapping;
    mapping.bytes_ = {static_cast<const std::byte*>(data), size};
    return mapping;
  }

  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

class HostPublishMemory : public PublishMemory {
 public:
  absl::StatusOr<std::vector<FinishedSlab>> Add(std::span<const int64_t> slab_bytes) override {
    std::vector<WritableSlab> made;
    std::vector<FinishedSlab> shared;
    for (const int64_t size_bytes : slab_bytes) {
      ASSIGN_OR_RETURN(made.emplace_back(), WritableSlab::Create(size_bytes));
      FinishedSlab& slab = shared.emplace_back();
      slab.description.set_size_bytes(made.back().size_bytes());
      slab.description.set_handle_kind(v1::HANDLE_KIND_HOST_MEMFD);
      slab.description.set_page_kind(made.back().page_kind());
      slab.fd = UniqueFd(fcntl(made.back().fd(), F_DUPFD_CLOEXEC, 0));
      if (!slab.fd.valid()) return SystemError("duplicating a slab's descriptor", errno);
    }
    std::move(made.begin(), made.end(), std::back_inserter(slabs_));
    return shared;
  }

  std::vector<int64_t> slab_bytes() const override {
    std::vector<int64_t> bytes;
    for (const WritableSlab& slab : slabs_) bytes.push_back(slab.size_bytes());
    return bytes;
  }

  int64_t filled_bytes() const override {
    int64_t filled_bytes = 0;
    for (const WritableSlab& slab : slabs_) filled_bytes += slab.filled_bytes();
    return filled_bytes;
  }

  absl::Status Seal() override {
    for (WritableSlab& slab : slabs_) RETURN_IF_ERROR(slab.Seal());
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<Digest>> DigestsOf(std::span<const v1::Tensor> rows) const override {
    std::vector<ReadMapping> mappings;
    for (const WritableSlab& slab : slabs_) {
      ASSIGN_OR_RETURN(ReadMapping mapping, ReadMapping::Map(slab));
      mappings.push_back(std::move(mapping));
    }
    std::vector<std::span<const std::byte>> tensors;
    for (const v1::Tensor& row : rows) {
      tensors.push_back(mappings[static_cast<size_t>(row.slab())].bytes().subspan(
          static_cast<size_t>(row.offset_bytes()), static_cast<size_t>(row.size_bytes())));
    }
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    return DigestTensors(tensors, std::clamp(cores, 1, kMaxDigestThreads));
  }

  absl::StatusOr<std::vector<FinishedSlab>> Finish() override {
    std::vector<FinishedSlab> finished;
    for (WritableSlab& slab : slabs_) {
      ASSIGN_OR_RETURN(SealedSlab sealed, std::move(slab).Finish());
      finished.push_back(FromSealed(std::move(sealed)));
    }
    return finished;
  }

 private:
  std::vector<WritableSlab> slabs_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PublishMemory>> PublishMemory::Create(const internal::v1::LoadRequest& request,
                                                                     const CudaOpener& open_cuda) {
  if (request.handle_kind() == v1::HANDLE_KIND_UNSPECIFIED || request.handle_kind() == v1::HANDLE_KIND_HOST_MEMFD) {
    return std::make_unique<HostPublishMemory>();
  }
  ASSIGN_OR_RETURN(CudaDriver* const cuda, open_cuda());
  return PublishOnGpu(request, *cuda);
}

}  // namespace weightbroker
