#include "common/memory/gpu_fd.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"

namespace weightbroker {
namespace {

constexpr unsigned kNvidiaMajor = 195;  // fixed in the driver, NV_MAJOR_DEVICE_NUMBER

std::string NameOf(int fd) {
  char target[256] = "";
  const std::string link = absl::StrCat("/proc/self/fd/", fd);
  const ssize_t size = readlink(link.c_str(), target, sizeof(target));
  return size > 0 ? std::string(target, static_cast<size_t>(size)) : "something without a name";
}

bool StartsWith(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

}  // namespace

absl::Status CheckGpuMemoryFd(int fd) {
  struct stat status {};
  if (fstat(fd, &status) != 0) return SystemError("fstat of a slab's descriptor", errno);
  const std::string name = NameOf(fd);
  const bool is_nvidia_device =
      S_ISCHR(status.st_mode) && (major(status.st_rdev) == kNvidiaMajor || StartsWith(name, "/dev/nvidia"));
  if (is_nvidia_device || StartsWith(name, "/dmabuf:") || StartsWith(name, "anon_inode:[nvidia")) {
    return absl::OkStatus();
  }
  return MakeError(Reason::kProtocolError,
                   absl::StrCat("a descriptor of GPU memory must be the NVIDIA driver's, and this is ", name),
                   {{"found", name}});
}

}  // namespace weightbroker
