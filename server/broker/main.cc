// weightbroker-broker: serves gRPC and descriptors on one Unix socket. The first SIGTERM or SIGINT drains and exits 0,
// the second exits at once.

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/socket.h"
#include "common/base/status_macros.h"
#include "common/keeper/client.h"
#include "server/broker/broker.h"
#include "server/broker/loader_spawner.h"
#include "server/config/config.h"
#include "server/endpoint/listener.h"

namespace weightbroker {
namespace {

constexpr char kProgram[] = "weightbroker-broker";
constexpr int kExitFailed = 1;
constexpr int kExitKilled = 128 + SIGTERM;

sigset_t EndSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return signals;
}

// In this thread and, because threads inherit it, in every thread that gRPC and the metrics will start.
void BlockSignals() {
  signal(SIGPIPE, SIG_IGN);
  const sigset_t signals = EndSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

std::string WaitForSignal() {
  const sigset_t signals = EndSignals();
  int number = 0;
  while (sigwait(&signals, &number) != 0) {
  }
  return number == SIGINT ? "SIGINT" : "SIGTERM";
}

BrokerOptions MakeOptions(const BrokerConfig& config, LoaderSpawner* spawner) {
  BrokerOptions options;
  for (const ConfiguredModelRoot& root : config.model_roots) options.model_roots.push_back({root.name, root.path});
  options.memory_limit_bytes = config.memory_limit_bytes;
  options.reader_threads = config.reader_threads;
  options.max_concurrent_loads = config.max_concurrent_loads;
  options.metrics_port = config.metrics_port;
  options.access = {config.allowed_uids, config.allowed_gids};
  options.version = WEIGHTBROKER_VERSION;
  options.spawner = spawner;
  return options;
}

// The connection to weightbrokerd, if it started this process or is said to be at a socket; otherwise null.
absl::StatusOr<std::unique_ptr<KeeperClient>> ConnectToKeeper(const BrokerConfig& config) {
  KeeperClientOptions options;
  // Without its keeper a broker must end: nobody would keep what it makes resident.
  options.on_disconnected = [] { kill(getpid(), SIGTERM); };
  if (config.keeper_fd.has_value()) return KeeperClient::FromFd(UniqueFd(*config.keeper_fd), options);
  if (!config.keeper_socket.empty()) return KeeperClient::FromPath(config.keeper_socket, options);
  return nullptr;
}

// Forgets what the broker before this one wrote down.
absl::Status DropAll(const std::vector<KeeperEntry>& entries, KeeperClient& keeper) {
  for (const KeeperEntry& entry : entries) {
    Log(LogLevel::kWarning, "broker.entry_dropped", {{"key", entry.key}});
    RETURN_IF_ERROR(keeper.Drop(entry.key));
  }
  return absl::OkStatus();
}

absl::Status Serve(const BrokerConfig& config) {
  ASSIGN_OR_RETURN(const std::unique_ptr<KeeperClient> keeper, ConnectToKeeper(config));
  KeeperInheritance inheritance = keeper != nullptr ? keeper->TakeInheritance() : KeeperInheritance();
  std::optional<Listener> listener;  // an inherited socket belongs to whoever started this process
  int listen_fd =
      inheritance.listening_socket.valid() ? inheritance.listening_socket.get() : config.listen_fd.value_or(-1);
  if (listen_fd < 0) {
    ASSIGN_OR_RETURN(listener, Listener::Create({.path = config.socket,
                                                 .mode = config.socket_mode,
                                                 .group = config.socket_group,
                                                 .create_folder = config.create_socket_folder}));
    listen_fd = listener->fd();
  }
  if (keeper != nullptr) RETURN_IF_ERROR(DropAll(inheritance.entries, *keeper));
  inheritance.entries.clear();
  const auto spawner = NewProcessLoaderSpawner(config.loader_path);
  ASSIGN_OR_RETURN(const std::unique_ptr<Broker> broker, Broker::Start(MakeOptions(config, spawner.get()), listen_fd));
  if (keeper != nullptr) RETURN_IF_ERROR(keeper->Ready());
  Log(LogLevel::kInfo, "broker.ready",
      {{"socket", config.socket},
       {"version", WEIGHTBROKER_VERSION},
       {"metrics", config.metrics_port.has_value() ? absl::StrCat("127.0.0.1:", broker->metrics_port()) : "none"},
       {"model_roots", absl::StrCat(config.model_roots.size())}});
  Log(LogLevel::kInfo, "broker.draining", {{"signal", WaitForSignal()}});
  // Not joined: it waits for a signal that need not come.
  std::thread([] {
    Log(LogLevel::kWarning, "broker.killed", {{"signal", WaitForSignal()}});
    _exit(kExitKilled);
  }).detach();
  broker->Shutdown();
  return absl::OkStatus();
}

int Run(const BrokerConfig& config) {
  SetLogLevel(config.log_level);
  RaiseFdLimit();
  if (const absl::Status status = Serve(config); !status.ok()) {
    Log(LogLevel::kError, "broker.failed", {{"message", std::string(status.message())}});
    return kExitFailed;
  }
  Log(LogLevel::kInfo, "broker.stopped");
  return 0;
}

}  // namespace
}  // namespace weightbroker

int main(int argc, char** argv) {
  weightbroker::SetLogProgram("broker");
  weightbroker::BlockSignals();
  const auto config = weightbroker::ParseBrokerConfig(argc, argv);
  if (const auto code = weightbroker::AnswerWithoutServing(weightbroker::kProgram, config); code.has_value()) {
    return *code;
  }
  return weightbroker::Run(*config);
}
