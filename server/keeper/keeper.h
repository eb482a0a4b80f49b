// Owns the listening socket and the broker that serves it: starts the broker, passes signals on to it, and ends with
// it.
//
//   ASSIGN_OR_RETURN(Keeper keeper, Keeper::Create(config, arguments));   // the socket is ours, nobody answers yet
//   ASSIGN_OR_RETURN(const ExitStatus broker, keeper.Run());
//
// The broker inherits the socket as descriptor 3. Single-threaded; links neither gRPC nor protobuf nor CUDA.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/process/spawn.h"
#include "server/config/config.h"
#include "server/endpoint/listener.h"
#include "server/keeper/event_loop.h"
#include "server/keeper/signals.h"

namespace weightbroker {

class Keeper {
 public:
  // Takes the socket. `broker_arguments` are the flags that this program was given: the broker gets them as they are.
  // Fails as Listener::Create does.
  static absl::StatusOr<Keeper> Create(const BrokerConfig& config, std::vector<std::string> broker_arguments);

  // Starts the broker and serves until it has ended; says how. SYSTEM_ERROR if it cannot be started.
  absl::StatusOr<ExitStatus> Run();

 private:
  Keeper(std::string broker_path, std::vector<std::string> broker_arguments, Listener listener, SignalReader signals)
      : broker_path_(std::move(broker_path)),
        broker_arguments_(std::move(broker_arguments)),
        listener_(std::move(listener)),
        signals_(std::move(signals)) {}

  absl::StatusOr<ChildProcess> StartBroker();
  void PassSignalsTo(ChildProcess* broker);

  std::string broker_path_;
  std::vector<std::string> broker_arguments_;
  Listener listener_;
  SignalReader signals_;
  EventLoop loop_;
};

}  // namespace weightbroker
