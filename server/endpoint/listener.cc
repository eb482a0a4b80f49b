#include "server/endpoint/listener.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

// A full backlog costs a gRPC client a whole second of back-off.
constexpr int kBacklog = 4096;
constexpr mode_t kFolderMode = 0755;
constexpr std::chrono::milliseconds kProbeInterval(10);

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == 0 ? "/" : path.substr(0, slash);
}

absl::Status Unusable(const std::string& path, const std::string& message) {
  return MakeError(Reason::kSocketUnusable, message, {{"socket", path}});
}

absl::Status UnusableByErrno(const std::string& path, const std::string& what, int error_number) {
  return MakeError(Reason::kSocketUnusable, absl::StrCat(what, ": ", strerror(error_number)),
                   {{"socket", path}, {"errno", strerrorname_np(error_number)}});
}

absl::Status InUse(const std::string& path, const std::string& pid) {
  return MakeError(Reason::kSocketInUse,
                   absl::StrCat("a service is already running on ", path, pid.empty() ? "" : " (process " + pid + ")",
                                ": stop it first, or choose another --socket"),
                   {{"socket", path}, {"pid", pid}});
}

// The process that began to listen there has ended, and another that has the socket from it has not.
absl::Status Remains(const std::string& path, const std::string& pid) {
  return MakeError(Reason::kSocketInUse,
                   absl::StrCat("what process ", pid, ", which has ended, has left behind still answers on ", path,
                                ": end its broker, or choose another --socket"),
                   {{"socket", path}, {"pid", pid}});
}

// Whoever owns the folder or the socket could put another socket in its place; root could do so anyway.
bool IsTrustedOwner(uid_t owner) { return owner == geteuid() || owner == 0; }

absl::Status CheckFolder(const ListenerOptions& options) {
  const std::string folder = FolderOf(options.path);
  if (options.create_folder && mkdir(folder.c_str(), kFolderMode) == 0) {
    chmod(folder.c_str(), kFolderMode);  // the umask may have taken bits away; if it stays so, only fewer can connect
  }
  struct stat stat_buffer {};
  if (stat(folder.c_str(), &stat_buffer) != 0) {
    return errno == ENOENT
               ? Unusable(options.path,
                          absl::StrCat("the socket's folder ", folder, " does not exist: create it first"))
               : UnusableByErrno(options.path, absl::StrCat("cannot use the socket's folder ", folder), errno);
  }
  if (!S_ISDIR(stat_buffer.st_mode)) return Unusable(options.path, absl::StrCat(folder, " is not a folder"));
  if (!IsTrustedOwner(stat_buffer.st_uid)) {
    return Unusable(options.path,
                    absl::StrCat("the socket's folder ", folder, " belongs to user ", stat_buffer.st_uid,
                                 ", who could replace the socket: use a folder of user ", geteuid(), " or of root"));
  }
  return absl::OkStatus();
}

std::string ReadLockHolder(int lock) {
  char text[16] = {};
  const ssize_t length = pread(lock, text, sizeof(text) - 1, 0);
  return length > 0 ? std::string(text, strspn(text, "0123456789")) : std::string();
}

bool WriteLockHolder(int lock) {
  const std::string pid = absl::StrCat(getpid(), "\n");
  return ftruncate(lock, 0) == 0 && pwrite(lock, pid.data(), pid.size(), 0) >= 0;
}

// Whether a process is on its way out, or has gone: its locks and sockets go with it in a moment. One whose memory has
// gone says nothing of it in /proc.
bool IsDying(const std::string& pid) {
  constexpr uint64_t kKillBit = uint64_t{1} << (SIGKILL - 1);
  std::ifstream status("/proc/" + pid + "/status");
  bool has_memory = false;
  for (std::string key, value; status >> key && std::getline(status >> std::ws, value);) {
    if (key == "VmSize:") has_memory = true;
    const bool pending = key == "SigPnd:" || key == "ShdPnd:";
    if (pending && (strtoull(value.c_str(), nullptr, 16) & kKillBit) != 0) return true;
  }
  return !has_memory;
}

// As flock does, but waits for a holder that is dying, and whose end may take as long as that of its memory.
int LockWhenTheDyingHaveGone(int lock, std::chrono::milliseconds patience) {
  const auto give_up = std::chrono::steady_clock::now() + patience;
  while (flock(lock, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    const std::string holder = ReadLockHolder(lock);
    const bool waits = error == EWOULDBLOCK && !holder.empty() && IsDying(holder);
    if (!waits || std::chrono::steady_clock::now() >= give_up) return error;
    std::this_thread::sleep_for(kProbeInterval);
  }
  return 0;
}

// Takes the lock for as long as the descriptor lives, and leaves our process id in the file for error messages.
absl::StatusOr<UniqueFd> TakeLock(const std::string& path, std::chrono::milliseconds patience) {
  const std::string lock_path = path + ".lock";
  UniqueFd lock(open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock.valid()) return UnusableByErrno(path, absl::StrCat("cannot write the lock file ", lock_path), errno);
  if (const int error = LockWhenTheDyingHaveGone(lock.get(), patience); error != 0) {
    if (error == EWOULDBLOCK) return InUse(path, ReadLockHolder(lock.get()));
    return UnusableByErrno(path, absl::StrCat("cannot lock ", lock_path), error);
  }
  if (!WriteLockHolder(lock.get())) {
    return UnusableByErrno(path, absl::StrCat("cannot write the lock file ", lock_path), errno);
  }
  return lock;
}

sockaddr_un Address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, path.data(), path.size());
  return address;
}

// The process that began to listen on a socket we are connected to; 0 if it is not known.
pid_t ListeningProcess(int socket) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) == 0 ? credentials.pid : 0;
}

// Ok if nothing answers on the socket. A full backlog (EAGAIN) or a socket of another type is a live service too.
absl::Status CheckNobodyAnswers(const std::string& path, int type) {
  UniqueFd probe(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!probe.valid()) return UnusableByErrno(path, "cannot create a socket", errno);
  const sockaddr_un address = Address(path);
  if (connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    const pid_t pid = ListeningProcess(probe.get());
    if (pid <= 0) return InUse(path, "");
    const bool has_ended = kill(pid, 0) != 0 && errno == ESRCH;
    return has_ended ? Remains(path, absl::StrCat(pid)) : InUse(path, absl::StrCat(pid));
  }
  if (errno == ECONNREFUSED) return absl::OkStatus();
  if (errno == EAGAIN || errno == EPROTOTYPE) return InUse(path, "");
  return UnusableByErrno(path, absl::StrCat("cannot tell whether a service is running on ", path), errno);
}

// The same once whoever answers has had the time to end.
absl::Status WaitUntilNobodyAnswers(const ListenerOptions& options) {
  const auto give_up = std::chrono::steady_clock::now() + options.patience;
  absl::Status status = CheckNobodyAnswers(options.path, options.type);
  for (bool is_first = true; HasReason(status, Reason::kSocketInUse); is_first = false) {
    if (std::chrono::steady_clock::now() >= give_up) return status;
    if (is_first) Log(LogLevel::kWarning, "listener.waiting", {{"message", std::string(status.message())}});
    std::this_thread::sleep_for(kProbeInterval);
    status = CheckNobodyAnswers(options.path, options.type);
  }
  return status;
}

// Leaves the path free, or says why it cannot.
absl::Status RemoveStaleSocket(const ListenerOptions& options) {
  const std::string& path = options.path;
  struct stat stat_buffer {};
  if (lstat(path.c_str(), &stat_buffer) != 0) {
    return errno == ENOENT ? absl::OkStatus() : UnusableByErrno(path, absl::StrCat("cannot examine ", path), errno);
  }
  if (!S_ISSOCK(stat_buffer.st_mode)) {
    return Unusable(path, absl::StrCat(path,
                                       " is there already and is not a socket: move it away, or choose another "
                                       "--socket"));
  }
  if (!IsTrustedOwner(stat_buffer.st_uid)) {
    return Unusable(path, absl::StrCat("the socket ", path, " belongs to user ", stat_buffer.st_uid, ", not to user ",
                                       geteuid(), ": choose another --socket"));
  }
  RETURN_IF_ERROR(WaitUntilNobodyAnswers(options));
  if (unlink(path.c_str()) != 0 && errno != ENOENT) {
    return UnusableByErrno(path, absl::StrCat("cannot remove the stale socket ", path), errno);
  }
  return absl::OkStatus();
}

// Nobody can connect before listen, so the mode that bind gave is never in force.
absl::Status SetPermissions(const ListenerOptions& options) {
  const char* path = options.path.c_str();
  if (options.group.has_value() && chown(path, static_cast<uid_t>(-1), *options.group) != 0) {
    return UnusableByErrno(options.path,
                           absl::StrCat("cannot give the socket ", path, " to group ", *options.group,
                                        " (a process that is not root must be a member)"),
                           errno);
  }
  if (chmod(path, options.mode) != 0) {
    return UnusableByErrno(options.path, absl::StrFormat("cannot set mode %04o on the socket %s", options.mode, path),
                           errno);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Listener> Listener::Create(const ListenerOptions& options) {
  const std::string& path = options.path;
  RETURN_IF_ERROR(CheckSocketPath(path));
  RETURN_IF_ERROR(CheckFolder(options));
  Listener listener;
  ASSIGN_OR_RETURN(listener.lock_, TakeLock(path, options.patience));
  RETURN_IF_ERROR(RemoveStaleSocket(options));

  listener.fd_.reset(socket(AF_UNIX, options.type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.fd_.valid()) return UnusableByErrno(path, "cannot create a socket", errno);
  const sockaddr_un address = Address(path);
  if (bind(listener.fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return UnusableByErrno(path, absl::StrCat("cannot create the socket ", path), errno);
  }
  struct stat stat_buffer {};
  if (lstat(path.c_str(), &stat_buffer) != 0) {
    return UnusableByErrno(path, absl::StrCat("the socket ", path, " has gone"), errno);
  }
  // From here on the destructor removes it.
  listener.path_ = path;
  listener.device_ = stat_buffer.st_dev;
  listener.inode_ = stat_buffer.st_ino;
  RETURN_IF_ERROR(SetPermissions(options));
  if (listen(listener.fd_.get(), kBacklog) != 0) {
    return UnusableByErrno(path, absl::StrCat("cannot listen on ", path), errno);
  }
  return listener;
}

Listener Listener::Adopt(ListenerParts parts) {
  Listener listener;
  listener.path_ = std::move(parts.path);
  listener.device_ = parts.device;
  listener.inode_ = parts.inode;
  listener.lock_ = std::move(parts.lock);
  listener.fd_ = std::move(parts.socket);
  WriteLockHolder(listener.lock_.get());  // only read for error messages
  return listener;
}

ListenerParts Listener::Release() && {
  return {.path = std::exchange(path_, ""),
          .device = device_,
          .inode = inode_,
          .lock = std::move(lock_),
          .socket = std::move(fd_)};
}

Listener& Listener::operator=(Listener&& other) noexcept {
  if (this != &other) {
    Close();
    path_ = std::move(other.path_);
    lock_ = std::move(other.lock_);
    fd_ = std::move(other.fd_);
    device_ = other.device_;
    inode_ = other.inode_;
  }
  return *this;
}

Listener::~Listener() { Close(); }

void Listener::Close() {
  struct stat stat_buffer {};
  const bool is_ours = fd_.valid() && !path_.empty() && lstat(path_.c_str(), &stat_buffer) == 0 &&
                       stat_buffer.st_dev == device_ && stat_buffer.st_ino == inode_;
  if (is_ours) unlink(path_.c_str());
  fd_.reset();
  lock_.reset();
}

}  // namespace weightbroker
