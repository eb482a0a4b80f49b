// A service manager's notification socket and descriptor store, with the rules of systemd 252: no two names for one
// open file, a removal takes all of a name, names are handed over with the descriptors.
//
//   FakeServiceManager systemd;
//   setenv("NOTIFY_SOCKET", systemd.path().c_str(), 1);
//   ...
//   EXPECT_TRUE(systemd.WasTold("READY=1"));
#pragma once

#include <fcntl.h>
#include <linux/kcmp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "common/base/mutex.h"
#include "common/base/unique_fd.h"
#include "server/keeper/service_manager.h"

namespace weightbroker::testing {

class FakeServiceManager {
 public:
  FakeServiceManager() : socket_(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
    static int count = 0;
    path_ = "@weightbroker_test_" + std::to_string(getpid()) + "_" + std::to_string(++count);
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, path_.data() + 1, path_.size() - 1);
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path_.size());
    if (bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) abort();
    reader_ = std::thread([this] { ReadUntilStopped(); });
  }
  ~FakeServiceManager() {
    stopping_ = true;
    reader_.join();
  }

  // For NOTIFY_SOCKET.
  const std::string& path() const { return path_; }

  // Whether a message had this line, since the fake was made.
  bool WasTold(const std::string& line) {
    MutexLock lock(mutex_);
    Receive();
    return lines_.count(line) > 0;
  }

  // The names in the store, sorted.
  std::vector<std::string> Names() {
    MutexLock lock(mutex_);
    Receive();
    std::vector<std::string> names;
    for (const NamedFd& stored : store_) names.push_back(stored.name);
    std::sort(names.begin(), names.end());
    return names;
  }

  // Duplicates of all in the store, as the next start of the service would get them.
  std::vector<NamedFd> HandOver() {
    MutexLock lock(mutex_);
    Receive();
    std::vector<NamedFd> fds;
    for (const NamedFd& stored : store_) {
      fds.push_back({stored.name, UniqueFd(fcntl(stored.fd.get(), F_DUPFD_CLOEXEC, 0))});
    }
    return fds;
  }

 private:
  // The kernel queues only a few messages, and a sender waits for room.
  void ReadUntilStopped() {
    while (!stopping_) {
      pollfd readable = {.fd = socket_.get(), .events = POLLIN, .revents = 0};
      poll(&readable, 1, 10);
      MutexLock lock(mutex_);
      Receive();
    }
  }

  void Receive() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    while (true) {
      char text[4096];
      iovec data = {.iov_base = text, .iov_len = sizeof(text)};
      alignas(cmsghdr) char control_buffer[CMSG_SPACE(sizeof(int))];
      msghdr header = {};
      header.msg_iov = &data;
      header.msg_iovlen = 1;
      header.msg_control = control_buffer;
      header.msg_controllen = sizeof(control_buffer);
      const ssize_t length = recvmsg(socket_.get(), &header, MSG_CMSG_CLOEXEC);
      if (length < 0) return;
      UniqueFd fd;
      if (const cmsghdr* control = CMSG_FIRSTHDR(&header); control != nullptr) {
        int number = -1;
        std::memcpy(&number, CMSG_DATA(control), sizeof(number));
        fd.reset(number);
      }
      Handle(std::string(text, static_cast<size_t>(length)), std::move(fd));
    }
  }

  void Handle(const std::string& text, UniqueFd fd) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::string name;
    std::set<std::string> lines;
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = std::min(text.find('\n', begin), text.size());
      const std::string line = text.substr(begin, end - begin);
      if (line.rfind("FDNAME=", 0) == 0) name = line.substr(7);
      lines.insert(line);
      lines_.insert(line);
      begin = end + 1;
    }
    if (lines.count("FDSTOREREMOVE=1") > 0) {
      std::erase_if(store_, [&](const NamedFd& stored) { return stored.name == name; });
    } else if (lines.count("FDSTORE=1") > 0 && !IsStored(fd.get())) {
      store_.push_back({name, std::move(fd)});
    }
  }

  bool IsStored(int fd) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return std::any_of(store_.begin(), store_.end(), [&](const NamedFd& stored) {
      return syscall(SYS_kcmp, getpid(), getpid(), KCMP_FILE, fd, stored.fd.get()) == 0;
    });
  }

  std::string path_;
  UniqueFd socket_;
  std::atomic<bool> stopping_ = false;
  std::thread reader_;

  Mutex mutex_;
  std::set<std::string> lines_ ABSL_GUARDED_BY(mutex_);
  std::vector<NamedFd> store_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weightbroker::testing
