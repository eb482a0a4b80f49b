#include "server/keeper/keeper.h"

#include <signal.h>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

constexpr int kBrokerListenFd = 3;

// The broker is in a process group of its own, so whatever would end this program must be passed on, or the broker
// would be left behind. It knows two: SIGTERM to drain and leave, and the same again to leave at once.
int SignalForBroker(int signal) { return signal == SIGINT ? SIGINT : SIGTERM; }

}  // namespace

absl::StatusOr<Keeper> Keeper::Create(const BrokerConfig& config, std::vector<std::string> broker_arguments) {
  ASSIGN_OR_RETURN(SignalReader signals, SignalReader::Create({SIGTERM, SIGINT, SIGHUP, SIGQUIT}));
  ASSIGN_OR_RETURN(Listener listener, Listener::Create({.path = config.socket,
                                                        .mode = config.socket_mode,
                                                        .group = config.socket_group,
                                                        .create_folder = config.create_socket_folder}));
  return Keeper(config.broker_path, std::move(broker_arguments), std::move(listener), std::move(signals));
}

absl::StatusOr<ChildProcess> Keeper::StartBroker() {
  SpawnOptions options{
      .path = broker_path_, .arguments = broker_arguments_, .fds = {{listener_.fd(), kBrokerListenFd}}};
  options.arguments.push_back(absl::StrCat("--listen_fd=", kBrokerListenFd));
  ASSIGN_OR_RETURN(ChildProcess broker, Spawn(options));
  Log(LogLevel::kInfo, "broker.started",
      {{"path", broker_path_}, {"broker_pid", absl::StrCat(broker.pid())}, {"socket", listener_.path()}});
  return broker;
}

void Keeper::PassSignalsTo(ChildProcess* broker) {
  while (const auto signal = signals_.Read()) {
    Log(LogLevel::kInfo, "signal.passed_on", {{"signal", sigabbrev_np(*signal)}});
    if (const absl::Status sent = broker->Kill(SignalForBroker(*signal)); !sent.ok()) {
      Log(LogLevel::kError, "signal.not_passed_on", {{"error", std::string(sent.message())}});
    }
  }
}

absl::StatusOr<ExitStatus> Keeper::Run() {
  ASSIGN_OR_RETURN(ChildProcess broker, StartBroker());
  loop_.WatchReadable(broker.pidfd(), [this] { loop_.Quit(); });
  loop_.WatchReadable(signals_.fd(), [this, &broker] { PassSignalsTo(&broker); });
  loop_.Run();
  loop_.Unwatch(signals_.fd());
  loop_.Unwatch(broker.pidfd());
  ASSIGN_OR_RETURN(const ExitStatus status, broker.Wait());
  Log(status.success() ? LogLevel::kInfo : LogLevel::kError, "broker.ended", {{"status", status.ToString()}});
  return status;
}

}  // namespace weightbroker
