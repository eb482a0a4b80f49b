#include "common/memory/writable_slab.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/memory/host_memory.h"
#include "common/memory/memfd.h"

namespace weightbroker {
namespace {

constexpr int kLengthSeals = F_SEAL_SHRINK | F_SEAL_GROW;
// FUTURE_WRITE says nothing more than WRITE does; it is what every sealed slab is known by.
constexpr int kWriteSeals = F_SEAL_WRITE | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;
constexpr int64_t kBlockBytes = 512;  // of st_blocks, whatever the file system

int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

absl::StatusOr<WritableSlab> WritableSlab::Create(int64_t size_bytes) {
  WritableSlab slab;
  slab.page_kind_ = ProbeHostPageKind(size_bytes);
  RETURN_IF_ERROR(CheckSlabSize(size_bytes, slab.page_kind_));
  const bool is_hugetlb = slab.page_kind_ == v1::PAGE_KIND_HUGETLB;
  slab.size_bytes_ = RoundUp(size_bytes, is_hugetlb ? kHugePageBytes : sysconf(_SC_PAGESIZE));
  ASSIGN_OR_RETURN(slab.fd_, CreateMemfd("weightbroker-slab", is_hugetlb ? MFD_HUGETLB | MFD_HUGE_2MB : 0));
  if (ftruncate(slab.fd_.get(), slab.size_bytes_) != 0) return SystemError("ftruncate of a memfd", errno);
  if (fcntl(slab.fd_.get(), F_ADD_SEALS, kLengthSeals) != 0) return SystemError("fcntl(F_ADD_SEALS)", errno);
  return slab;
}

int64_t WritableSlab::filled_bytes() const {
  struct stat status {};
  return fstat(fd_.get(), &status) == 0 ? static_cast<int64_t>(status.st_blocks) * kBlockBytes : 0;
}

absl::Status WritableSlab::Seal() {
  if (sealed_) return absl::OkStatus();
  if (fcntl(fd_.get(), F_ADD_SEALS, kWriteSeals) != 0) {
    if (errno != EBUSY) return SystemError("fcntl(F_ADD_SEALS)", errno);
    return MakeError(Reason::kStillWritable,
                     "a process still has a slab mapped writable, or the kernel still writes to it: unmap every slab "
                     "in every process, and commit again");
  }
  sealed_ = true;
  if (fchmod(fd_.get(), 0400) != 0) return SystemError("fchmod of a memfd", errno);
  return absl::OkStatus();
}

absl::StatusOr<SealedSlab> WritableSlab::Finish() && {
  if (!sealed_) return MakeError(Reason::kStillWritable, "the slab has not been sealed");
  SealedSlab sealed;
  ASSIGN_OR_RETURN(sealed.fd, ReopenForReading(fd_.get()));
  sealed.size_bytes = size_bytes_;
  sealed.page_kind = page_kind_;
  fd_.reset();
  return sealed;
}

absl::Status CheckWritableMemfd(int fd, int64_t size_bytes) {
  struct stat status {};
  const int seals = fcntl(fd, F_GET_SEALS);
  const bool is_right = seals >= 0 && (seals & kLengthSeals) == kLengthSeals && (seals & F_SEAL_WRITE) == 0 &&
                        (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDWR && fstat(fd, &status) == 0 &&
                        status.st_size == size_bytes;
  if (is_right) return absl::OkStatus();
  return MakeError(Reason::kProtocolError, absl::StrCat("a descriptor that was received is no writable memfd of ",
                                                        size_bytes, " bytes with a fixed length"));
}

}  // namespace weightbroker
