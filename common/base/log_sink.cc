#include "common/base/log_sink.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

#include "common/base/mutex.h"
#include "common/base/unique_fd.h"

namespace weightbroker {
namespace {

// O_NONBLOCK belongs to the open file, which other processes share: it must not be set on stderr itself. A pipe can be
// opened once more through /proc, and what is opened so has flags of its own.
class ReopenedPipe {
 public:
  explicit ReopenedPipe(const struct stat& identity)
      : device_(identity.st_dev),
        inode_(identity.st_ino),
        fd_(open("/proc/self/fd/2", O_WRONLY | O_NONBLOCK | O_CLOEXEC)) {}

  bool IsOf(const struct stat& identity) const { return identity.st_dev == device_ && identity.st_ino == inode_; }
  int fd() const { return fd_.get(); }

 private:
  const dev_t device_;
  const ino_t inode_;
  const UniqueFd fd_;  // invalid if it could not be opened: no /proc, or a pipe that another user has made
};

// The pipe at stderr, reopened once for as long as it is the same.
std::shared_ptr<const ReopenedPipe> Reopen(const struct stat& identity) {
  static Mutex* const mutex = new Mutex;
  static auto* const current = new std::shared_ptr<const ReopenedPipe>;
  MutexLock lock(*mutex);
  if (*current == nullptr || !(*current)->IsOf(identity)) *current = std::make_shared<const ReopenedPipe>(identity);
  return *current;
}

bool HasRoom(int fd) {
  pollfd room = {.fd = fd, .events = POLLOUT, .revents = 0};
  return poll(&room, 1, 0) == 1 && (room.revents & POLLOUT) != 0;
}

bool IsWhole(ssize_t written, std::string_view line) { return written == static_cast<ssize_t>(line.size()); }

bool WriteToPipe(const struct stat& identity, std::string_view line) {
  const auto pipe = Reopen(identity);
  if (pipe->fd() >= 0) return IsWhole(write(pipe->fd(), line.data(), line.size()), line);
  const iovec whole = {.iov_base = const_cast<char*>(line.data()), .iov_len = line.size()};
  const ssize_t written = pwritev2(STDERR_FILENO, &whole, 1, -1, RWF_NOWAIT);
  if (written >= 0 || errno != EOPNOTSUPP) return IsWhole(written, line);
  // Before Linux 6.4. A pipe that polls as writable takes PIPE_BUF bytes, unless another process is faster by a hair.
  return HasRoom(STDERR_FILENO) && IsWhole(write(STDERR_FILENO, line.data(), line.size()), line);
}

// The kernel takes so little in one piece.
bool WriteToSocket(std::string_view line) {
  return IsWhole(send(STDERR_FILENO, line.data(), line.size(), MSG_DONTWAIT | MSG_NOSIGNAL), line);
}

bool WriteToFile(std::string_view line) {
  ssize_t written = -1;
  do {
    written = write(STDERR_FILENO, line.data(), line.size());
  } while (written < 0 && errno == EINTR);
  return IsWhole(written, line);
}

}  // namespace

bool WriteLogLine(std::string_view line) {
  struct stat identity = {};
  if (fstat(STDERR_FILENO, &identity) != 0) return false;
  if (S_ISFIFO(identity.st_mode)) return WriteToPipe(identity, line);
  if (S_ISSOCK(identity.st_mode)) return WriteToSocket(line);
  return WriteToFile(line);
}

}  // namespace weightbroker
