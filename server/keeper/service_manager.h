// The little of systemd's protocols that the keeper speaks: readiness, the watchdog, and the descriptor store.
//
//   ServiceManager manager = ServiceManager::FromEnvironment();    // the variables are gone from the environment after
//   manager.Notify("READY=1");
//   manager.StoreFd("wb-3-0", slab_fd);
//
// Without a service manager every call does nothing. A message that cannot be sent is logged. Not thread-safe.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/unique_fd.h"

namespace weightbroker {

// A descriptor that the service manager kept for us, and the name under which we had stored it.
struct NamedFd {
  std::string name;
  UniqueFd fd;
};

class ServiceManager {
 public:
  // Reads NOTIFY_SOCKET, WATCHDOG_USEC, WATCHDOG_PID, and removes them: they are not meant for the programs that the
  // keeper starts.
  static ServiceManager FromEnvironment();
  // After execve: what notify_socket() and watchdog_interval() were.
  ServiceManager(std::string notify_socket, std::chrono::microseconds watchdog_interval);

  // Takes what LISTEN_PID, LISTEN_FDS and LISTEN_FDNAMES say was handed over, and removes the variables.
  static std::vector<NamedFd> TakeInheritedFds();

  bool present() const { return !notify_socket_.empty(); }
  const std::string& notify_socket() const { return notify_socket_; }
  // How often WATCHDOG=1 is due; 0 if never.
  std::chrono::microseconds watchdog_interval() const { return watchdog_interval_; }

  void Notify(std::string_view text) const { SendNotification(text, -1); }
  void StoreFd(const std::string& name, int fd) const;
  void RemoveFd(const std::string& name) const;

 private:
  void SendNotification(std::string_view text, int fd) const;

  std::string notify_socket_;  // a path, or with a leading '@' an abstract name
  std::chrono::microseconds watchdog_interval_{0};
};

}  // namespace weightbroker
