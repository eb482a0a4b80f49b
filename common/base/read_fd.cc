#include "common/base/read_fd.h"

#include <unistd.h>

#include <cerrno>

#include "common/base/error.h"

namespace weightbroker {

absl::StatusOr<std::string> ReadFd(int fd, size_t size_bytes, const std::string& what) {
  std::string bytes(size_bytes, '\0');
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t count = pread(fd, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return SystemError(what, errno);
    if (count == 0) break;
    done += static_cast<size_t>(count);
  }
  bytes.resize(done);
  return bytes;
}

}  // namespace weightbroker
