#include "common/memory/memfd.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

#ifndef MFD_NOEXEC_SEAL  // Linux 6.3
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace weightbroker {

absl::StatusOr<UniqueFd> CreateMemfd(const char* name, unsigned flags) {
  flags |= MFD_CLOEXEC | MFD_ALLOW_SEALING;
  // A system may insist on NOEXEC_SEAL (vm.memfd_noexec=2); kernels before 6.3 do not know it.
  UniqueFd fd(memfd_create(name, flags | MFD_NOEXEC_SEAL));
  if (!fd.valid() && errno == EINVAL) fd.reset(memfd_create(name, flags));
  if (!fd.valid()) return SystemError("memfd_create", errno);
  return fd;
}

absl::StatusOr<UniqueFd> SealAndReopen(UniqueFd fd, int seals) {
  if (fchmod(fd.get(), 0400) != 0) return SystemError("fchmod of a memfd", errno);
  if (fcntl(fd.get(), F_ADD_SEALS, seals) != 0) return SystemError("fcntl(F_ADD_SEALS)", errno);
  return ReopenForReading(fd.get());
}

absl::StatusOr<UniqueFd> ReopenForReading(int fd) {
  const std::string path = absl::StrCat("/proc/self/fd/", fd);
  UniqueFd read_only(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!read_only.valid()) return SystemError(absl::StrCat("open ", path), errno);
  return read_only;
}

}  // namespace weightbroker
