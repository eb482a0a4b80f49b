#include "common/memory/host_slab.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/memory/huge_pages.h"
#include "common/memory/memfd.h"

#ifndef MADV_POPULATE_WRITE  // Linux 5.14
#define MADV_POPULATE_WRITE 23
#endif

namespace weightbroker {
namespace {

// FUTURE_WRITE and not WRITE: the latter is refused while the kernel still has a page pinned for direct I/O.
constexpr int kSlabSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;

struct SealName {
  int seal;
  const char* name;
};
constexpr SealName kSealNames[] = {{F_SEAL_SHRINK, "F_SEAL_SHRINK"},
                                   {F_SEAL_GROW, "F_SEAL_GROW"},
                                   {F_SEAL_FUTURE_WRITE, "F_SEAL_FUTURE_WRITE"},
                                   {F_SEAL_SEAL, "F_SEAL_SEAL"}};

int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

absl::Status NotEnoughMemory(int64_t need_bytes, const HostMemory& memory) {
  return MakeError(
      Reason::kMemoryExhausted,
      absl::StrCat("the weights need ", need_bytes, " bytes of host memory, and the ", memory.limited_by, " has ",
                   memory.available_bytes, " left: unregister other weight sets or allow this service more memory"),
      {{"need_bytes", absl::StrCat(need_bytes)},
       {"have_bytes", absl::StrCat(memory.available_bytes)},
       {"limited_by", memory.limited_by}});
}

absl::Status CheckMemory(int64_t need_bytes) {
  const HostMemory memory = ReadHostMemory();
  return need_bytes <= memory.available_bytes ? absl::OkStatus() : NotEnoughMemory(need_bytes, memory);
}

absl::Status CheckPositive(int64_t size_bytes) {
  if (size_bytes > 0) return absl::OkStatus();
  return MakeError(Reason::kInvalidArgument, absl::StrCat("a slab of ", size_bytes, " bytes cannot be made"));
}

// Maps `fd` at an address that is a multiple of kHugePageBytes: only then can the kernel use huge pages all through.
absl::StatusOr<std::byte*> MapAligned(int fd, int64_t size_bytes) {
  const auto size = static_cast<size_t>(size_bytes);
  const size_t room = size + kHugePageBytes;
  void* const reserved = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return SystemError("mmap", errno);
  const auto begin = reinterpret_cast<uintptr_t>(reserved);
  const uintptr_t aligned = (begin + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  void* const data =
      mmap(reinterpret_cast<void*>(aligned), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  if (data == MAP_FAILED) {
    const int error_number = errno;
    munmap(reserved, room);
    return SystemError("mmap", error_number);
  }
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t end = (aligned + size + page - 1) / page * page;
  if (aligned > begin) munmap(reserved, aligned - begin);
  if (begin + room > end) munmap(reinterpret_cast<void*>(end), begin + room - end);
  return static_cast<std::byte*>(data);
}

// Maps the huge pages that were written to the file; where nothing was, reading would make one.
void MapWhatWasWritten(std::byte* data, int64_t size_bytes) {
  for (int64_t at = 0; at < size_bytes; at += kHugePageBytes) {
    unsigned char is_there = 0;
    if (mincore(data + at, 1, &is_there) == 0 && (is_there & 1) != 0) {
      (void)*static_cast<const volatile std::byte*>(data + at);
    }
  }
}

absl::Status WriteAll(int fd, std::span<const std::byte> contents) {
  while (!contents.empty()) {
    const ssize_t written = write(fd, contents.data(), contents.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return SystemError("write to a memfd", errno);
    contents = contents.subspan(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<HostSlab> HostSlab::CreateWith(v1::PageKind page_kind, int64_t size_bytes) {
  const bool is_hugetlb = page_kind == v1::PAGE_KIND_HUGETLB;
  HostSlab slab;
  slab.page_kind_ = page_kind;
  slab.prefers_write_ =
      page_kind == v1::PAGE_KIND_BASE || (page_kind == v1::PAGE_KIND_TRANSPARENT_HUGE && WritesTakeHugePages());
  slab.size_bytes_ = RoundUp(size_bytes, is_hugetlb ? kHugePageBytes : sysconf(_SC_PAGESIZE));
  // Reserved huge pages were set apart already; the mapping below fails if there are not enough.
  if (!is_hugetlb) RETURN_IF_ERROR(CheckMemory(slab.size_bytes_));
  ASSIGN_OR_RETURN(slab.fd_, CreateMemfd("weightbroker-slab", is_hugetlb ? MFD_HUGETLB | MFD_HUGE_2MB : 0));
  if (ftruncate(slab.fd_.get(), slab.size_bytes_) != 0) return SystemError("ftruncate of a memfd", errno);
  ASSIGN_OR_RETURN(slab.data_, MapAligned(slab.fd_.get(), slab.size_bytes_));
  if (page_kind == v1::PAGE_KIND_TRANSPARENT_HUGE) {
    // Where this is refused, base pages are what there is; Seal reports what was got.
    madvise(slab.data_, static_cast<size_t>(slab.size_bytes_), MADV_HUGEPAGE);
  }
  return slab;
}

absl::StatusOr<HostSlab> HostSlab::Create(int64_t size_bytes) {
  RETURN_IF_ERROR(CheckPositive(size_bytes));
  const v1::PageKind page_kind = ProbeHostPageKind(size_bytes);
  if (page_kind == v1::PAGE_KIND_HUGETLB) {
    auto slab = CreateWith(page_kind, size_bytes);
    if (slab.ok()) return slab;
    return CreateWith(v1::PAGE_KIND_TRANSPARENT_HUGE, size_bytes);  // another process was faster
  }
  return CreateWith(page_kind, size_bytes);
}

HostSlab::HostSlab() : write_mutex_(std::make_unique<Mutex>()) {}

HostSlab::HostSlab(HostSlab&& other) noexcept
    : write_mutex_(std::move(other.write_mutex_)),
      fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)),
      page_kind_(other.page_kind_),
      prefers_write_(other.prefers_write_) {}

HostSlab& HostSlab::operator=(HostSlab&& other) noexcept {
  if (this != &other) {
    Unmap();
    write_mutex_ = std::move(other.write_mutex_);
    fd_ = std::move(other.fd_);
    data_ = std::exchange(other.data_, nullptr);
    size_bytes_ = std::exchange(other.size_bytes_, 0);
    page_kind_ = other.page_kind_;
    prefers_write_ = other.prefers_write_;
  }
  return *this;
}

HostSlab::~HostSlab() { Unmap(); }

void HostSlab::Unmap() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(size_bytes_));
  data_ = nullptr;
}

absl::Status HostSlab::Populate(int64_t offset_bytes, int64_t size_bytes) {
  if (size_bytes <= 0) return absl::OkStatus();
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t begin = offset_bytes / page * page;
  const int64_t end = std::min(RoundUp(offset_bytes + size_bytes, page), size_bytes_);
  const auto size = static_cast<size_t>(end - begin);
  int error_number = 0;
  do {
    error_number = madvise(data_ + begin, size, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
  } while (error_number == EAGAIN || error_number == EINTR);
  if (error_number == EINVAL) {  // a kernel before 5.14
    error_number = fallocate(fd_.get(), 0, begin, end - begin) == 0 ? 0 : errno;
  }
  if (error_number == 0) return absl::OkStatus();
  // EFAULT stands for what would have been SIGBUS: tmpfs had no page to give.
  if (error_number == ENOMEM || error_number == ENOSPC || error_number == EFAULT) {
    return NotEnoughMemory(end - begin, ReadHostMemory());
  }
  return SystemError("madvise(MADV_POPULATE_WRITE)", error_number);
}

absl::Status HostSlab::Write(int64_t offset_bytes, std::span<const std::span<const std::byte>> parts) {
  if (PrefersWrite()) return WriteToFile(offset_bytes, parts);
  int64_t total_bytes = 0;
  for (const auto& part : parts) total_bytes += static_cast<int64_t>(part.size());
  RETURN_IF_ERROR(Populate(offset_bytes, total_bytes));
  std::byte* to = data_ + offset_bytes;
  for (const auto& part : parts) to = std::copy(part.begin(), part.end(), to);
  return absl::OkStatus();
}

absl::Status HostSlab::WriteToFile(int64_t offset_bytes, std::span<const std::span<const std::byte>> parts) {
  std::vector<iovec> vectors;
  for (const auto& part : parts) {
    vectors.push_back({.iov_base = const_cast<std::byte*>(part.data()), .iov_len = part.size()});
  }
  size_t next = 0;  // the first vector that is not written, less what its base has been advanced by
  MutexLock lock(*write_mutex_);
  while (next < vectors.size()) {
    const size_t count = std::min<size_t>(vectors.size() - next, IOV_MAX);
    ssize_t written = pwritev(fd_.get(), &vectors[next], static_cast<int>(count), offset_bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && (errno == ENOSPC || errno == ENOMEM)) return NotEnoughMemory(size_bytes_, ReadHostMemory());
    if (written < 0) return SystemError("pwritev to a memfd", errno);
    offset_bytes += written;
    while (next < vectors.size() && static_cast<size_t>(written) >= vectors[next].iov_len) {
      written -= static_cast<ssize_t>(vectors[next++].iov_len);
    }
    if (written > 0) {
      vectors[next].iov_base = static_cast<std::byte*>(vectors[next].iov_base) + written;
      vectors[next].iov_len -= static_cast<size_t>(written);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<SealedSlab> HostSlab::Seal() && {
  SealedSlab sealed;
  sealed.size_bytes = size_bytes_;
  sealed.page_kind = page_kind_;
  if (page_kind_ == v1::PAGE_KIND_TRANSPARENT_HUGE && prefers_write_) MapWhatWasWritten(data_, size_bytes_);
  if (page_kind_ == v1::PAGE_KIND_TRANSPARENT_HUGE && HugeMappedBytes(data_, size_bytes_) < size_bytes_ / 2) {
    sealed.page_kind = v1::PAGE_KIND_BASE;
  }
  Unmap();
  ASSIGN_OR_RETURN(sealed.fd, SealAndReopen(std::move(fd_), kSlabSeals));
  return sealed;
}

absl::Status CheckSlabSize(int64_t size_bytes, v1::PageKind page_kind) {
  RETURN_IF_ERROR(CheckPositive(size_bytes));
  return page_kind == v1::PAGE_KIND_HUGETLB ? absl::OkStatus() : CheckMemory(size_bytes);
}

absl::StatusOr<UniqueFd> CreateSealedMemfd(const char* name, std::span<const std::byte> contents) {
  ASSIGN_OR_RETURN(UniqueFd fd, CreateMemfd(name, 0));
  RETURN_IF_ERROR(WriteAll(fd.get(), contents));
  return SealAndReopen(std::move(fd), kSlabSeals | F_SEAL_WRITE);
}

absl::Status CheckSealedMemfd(int fd, int64_t size_bytes) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0) {
    return MakeError(Reason::kProtocolError, "a descriptor that was received is no memfd: it has no seals");
  }
  std::string missing;
  for (const SealName& row : kSealNames) {
    if ((seals & row.seal) == 0) absl::StrAppend(&missing, missing.empty() ? "" : "|", row.name);
  }
  if (!missing.empty()) {
    return MakeError(Reason::kProtocolError,
                     absl::StrCat("a memfd that was received is not sealed: it lacks ", missing),
                     {{"missing_seals", missing}});
  }
  if ((fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY) {
    return MakeError(Reason::kProtocolError, "a memfd that was received is not open for reading only");
  }
  struct stat status {};
  if (fstat(fd, &status) != 0) return SystemError("fstat of a memfd", errno);
  if (status.st_size != size_bytes) {
    return MakeError(
        Reason::kProtocolError,
        absl::StrCat("a memfd that was received has ", status.st_size, " bytes, and ", size_bytes, " were announced"),
        {{"found_bytes", absl::StrCat(status.st_size)}, {"expected_bytes", absl::StrCat(size_bytes)}});
  }
  return absl::OkStatus();
}

}  // namespace weightbroker
