// Starts a service that goes on when the process that started it has ended.
//
//   const Daemon daemon(settings, socket);
//   if (!SomebodyListens(socket.path)) {
//     auto started = daemon.Start(timeout);            // SERVICE_NOT_STARTED names the program and ends its log
//     ...
//     return daemon.Ended(*started);                   // if nobody listens any more
//   }
//
// When many processes do so at once, the service's own lock decides: one of them gets the socket, the others end and
// say so, and everybody connects to the one that is left. Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/socket_path.h"

namespace weightbroker::client {

struct DaemonSettings {
  std::string program = {};             // empty: $WEIGHTBROKERD, else weightbrokerd beside this program
  std::vector<std::string> flags = {};  // besides --socket
  std::string log_path = {};            // empty: the socket's path and ".log"
};

class Daemon {
 public:
  Daemon(DaemonSettings settings, DefaultSocket socket);

  // What was started, or what another process has started meanwhile.
  struct Started {
    int64_t log_offset_bytes = 0;  // where its part of the log begins
  };

  // Returns once somebody listens on the socket. SERVICE_NOT_STARTED, with the last lines of its log, if the program is
  // not there, ends without listening, or takes longer than `timeout`.
  absl::StatusOr<Started> Start(std::chrono::milliseconds timeout) const;

  // The error for a service that has ended soon after it was started, with the last lines of its log.
  absl::Status Ended(const Started& started) const;

 private:
  absl::StatusOr<std::string> FindProgram() const;
  std::vector<std::string> Arguments() const;
  absl::Status NotStarted(const std::string& program, const std::string& how, int64_t log_offset_bytes) const;

  const DaemonSettings settings_;
  const DefaultSocket socket_;
  const std::string log_path_;
};

// Whether a connect to `path` is taken or queued: somebody has the socket open.
bool SomebodyListens(const std::string& path);

}  // namespace weightbroker::client
