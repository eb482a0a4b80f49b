// The least that a call can be: an echo over gRPC on a Unix socket that gRPC itself listens on, and one over a bare
// Unix socket without gRPC. Each server runs until it is killed.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench_echo.grpc.pb.h"
#include "common/base/unique_fd.h"

namespace weightbroker::bench {

// Exit codes of a process that does nothing else.
int ServeGrpcEcho(const std::string& socket);
int ServeRawEcho(const std::string& socket);

// A connected channel to a Unix socket. Ends the program if nothing answers within 20 s.
std::shared_ptr<grpc::Channel> ConnectOrDie(const std::string& socket);

// A connection to ServeRawEcho. Not thread-safe.
class RawEchoClient {
 public:
  // Waits until somebody listens, at most 20 s.
  static absl::StatusOr<RawEchoClient> Connect(const std::string& socket);

  // Sends kRawEchoBytes and waits until they have come back.
  absl::Status Echo();

 private:
  explicit RawEchoClient(UniqueFd fd) : fd_(std::move(fd)) {}

  UniqueFd fd_;
};

inline constexpr size_t kRawEchoBytes = 64;

}  // namespace weightbroker::bench
