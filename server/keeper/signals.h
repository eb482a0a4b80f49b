// Signals as something to read, so that they arrive in the event loop like everything else.
//
//   ASSIGN_OR_RETURN(SignalReader signals, SignalReader::Create({SIGTERM, SIGINT}));    // blocks them
//   loop.WatchReadable(signals.fd(), [&] { Handle(signals.Read()); });
//
// Not thread-safe. Create it before there are threads: they inherit what is blocked.
#pragma once

#include <initializer_list>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"

namespace weightbroker {

class SignalReader {
 public:
  // Blocks `signals` for the calling thread, for good. SYSTEM_ERROR if the kernel gives no descriptor.
  static absl::StatusOr<SignalReader> Create(std::initializer_list<int> signals);

  // Readable when a signal has come.
  int fd() const { return fd_.get(); }

  // The next signal that has come, if any. The same signal sent twice before it is read may come once.
  std::optional<int> Read();

 private:
  explicit SignalReader(UniqueFd fd) : fd_(std::move(fd)) {}

  UniqueFd fd_;
};

}  // namespace weightbroker
