// weightbroker-broker: serves gRPC and descriptors on one Unix socket. The first SIGTERM or SIGINT drains and exits 0,
// the second exits at once. With a keeper, what is resident outlives it; without one it listens by itself and keeps
// nothing. SIGHUP has it read the desired state again. If the keeper goes it drains and exits 1: nobody would keep what
// it makes resident from then on.

#include <grpc/support/log.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/log_format.h"
#include "common/base/mutex.h"
#include "common/base/socket.h"
#include "common/base/status_macros.h"
#include "common/base/thread.h"
#include "common/base/unique_fd.h"
#include "common/desired/desired_check.h"
#include "common/keeper/client.h"
#include "common/memory/host_memory.h"
#include "common/plan/architecture.h"
#include "server/broker/broker.h"
#include "server/broker/device_catalog.h"
#include "server/broker/keeper_loader_spawner.h"
#include "server/broker/keeper_vault.h"
#include "server/broker/loader_spawner.h"
#include "server/config/config.h"
#include "server/endpoint/listener.h"

namespace weightbroker {
namespace {

constexpr char kProgram[] = "weightbroker-broker";
constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;  // the configuration is invalid: only a person can change that
constexpr char kReloadSignal[] = "SIGHUP";
constexpr int kExitKilled = 128 + SIGTERM;
constexpr std::chrono::seconds kTakeDownLimit{10};
// gRPC, the endpoint, the keeper and the metrics take some 40; the rest is for connections and what is resident.
constexpr int64_t kLeastOpenFiles = 128;

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
  sigset_t signals = EndSignals();
  sigaddset(&signals, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

// gRPC writes to stderr itself, and waits for whoever reads it; and what it has to say is mostly of a client that has
// sent something odd, which is not the operator's to mend. It stays to be had, with --log_level=debug.
void TakeGrpcLog() {
  gpr_set_log_function([](gpr_log_func_args* args) {
    Log(LogLevel::kDebug, "grpc.log",
        {{"file", args->file}, {"line", absl::StrCat(args->line)}, {"message", args->message}});
  });
}

std::string WaitForSignal(const sigset_t& signals) {
  int number = 0;
  while (sigwait(&signals, &number) != 0) {
  }
  return number == SIGHUP ? kReloadSignal : number == SIGINT ? "SIGINT" : "SIGTERM";
}

// Reads the desired state again at each SIGHUP.
std::string ServeUntilSignal(Broker& broker) {
  sigset_t signals = EndSignals();
  sigaddset(&signals, SIGHUP);
  std::string signal = WaitForSignal(signals);
  while (signal == kReloadSignal) {
    broker.ReloadDesired();
    signal = WaitForSignal(signals);
  }
  return signal;
}

// Lets the keeper's thread ask a broker that may not be there yet, or any more.
class AliveProbe {
 public:
  // While this lives, the broker is asked.
  class Scope {
   public:
    Scope(AliveProbe* probe, Broker* broker) : probe_(probe) { probe_->Set(broker); }
    ~Scope() { probe_->Set(nullptr); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    AliveProbe* const probe_;
  };

  bool Ask() {
    MutexLock lock(mutex_);
    return broker_ == nullptr || broker_->IsAlive();
  }

 private:
  void Set(Broker* broker) {
    MutexLock lock(mutex_);
    broker_ = broker;
  }

  Mutex mutex_;
  Broker* broker_ ABSL_GUARDED_BY(mutex_) = nullptr;
};

// What the broker needs of the world around it, which is the keeper's or its own. Goes after the broker.
struct Surroundings {
  AliveProbe alive;
  std::atomic<bool> keeper_lost{false};
  std::optional<Listener> own_listener;
  UniqueFd inherited_listener;
  int listen_fd = -1;
  std::unique_ptr<LoaderSpawner> spawner;
  std::unique_ptr<KeeperVault> keeper_vault;
  std::unique_ptr<KeeperClient> keeper;  // first to go: its threads use what stands above

  ShardVault* vault() const { return keeper_vault != nullptr ? keeper_vault.get() : &NoVault(); }
};

// Files that are wrong are found when the service starts, not when a model needs them.
absl::StatusOr<std::map<std::string, std::string>> ReadArchitectures(const std::string& folder) {
  if (folder.empty()) return std::map<std::string, std::string>();
  ASSIGN_OR_RETURN(auto texts, ReadArchitectureFolder(RealFileSystem(), folder));
  RETURN_IF_ERROR(ArchitectureSet::WithFiles(texts).status());
  return texts;
}

// Nothing where no GPU is served, for whatever reason: that is in the log already, as gpu.none.
absl::StatusOr<std::unique_ptr<GpuEventSource>> OpenEventsOf(DeviceCatalog& devices) {
  const std::vector<ServedDevice> served = devices.Served();
  const bool has_gpu =
      std::any_of(served.begin(), served.end(), [](const ServedDevice& device) { return device.name != kHostDevice; });
  if (!has_gpu) return std::unique_ptr<GpuEventSource>();
  return OpenNvmlEvents();
}

BrokerOptions MakeOptions(const BrokerConfig& config, const Surroundings& around, DeviceCatalog* devices) {
  BrokerOptions options;
  for (const ConfiguredModelRoot& root : config.model_roots) options.model_roots.push_back({root.name, root.path});
  options.memory_limit_bytes = config.memory_limit.Of(ReadHostMemoryTotal());
  options.device_memory_limit = config.device_memory_limit;
  options.evicts_idle = config.evicts_idle;
  options.reading = {.reader_threads = config.reader_threads,
                     .reads_per_thread = config.reads_per_thread,
                     .chunk_bytes = config.read_chunk_bytes,
                     .method = config.read_method};
  options.max_concurrent_loads = config.max_concurrent_loads;
  options.publish_timeout = config.publish_timeout;
  for (const EngineMethod& method : config.publish_quantizations) {
    options.publish_quantizations.insert({method.engine, method.version, method.method});
  }
  options.exports_unverified = config.exports_unverified;
  options.loader_stall_timeout = config.loader_stall_timeout;
  options.desired_file = config.desired_file;
  options.metrics_port = config.metrics_port;
  options.access = config.access;
  options.open_gpu_events = [devices] { return OpenEventsOf(*devices); };
  options.scrub_interval = config.scrub_interval;
  options.scrub_bytes_per_second = config.scrub_bytes_per_second;
  options.caps = {.connections_per_uid = config.max_connections_per_uid,
                  .streams_per_connection = config.max_streams_per_connection,
                  .calls_per_uid = config.max_calls_per_uid,
                  .request_bytes = config.max_request_bytes,
                  .metadata_bytes = config.max_metadata_bytes,
                  .call_deadline = config.call_deadline,
                  .write_timeout = config.write_timeout};
  options.version = WEIGHTBROKER_VERSION;
  options.spawner = around.spawner.get();
  options.vault = around.vault();
  options.devices = devices;
  return options;
}

bool HasKeeper(const BrokerConfig& config) { return config.keeper_fd.has_value() || !config.keeper_socket.empty(); }

absl::Status JoinKeeper(const BrokerConfig& config, Surroundings* around) {
  KeeperClientOptions options;
  options.alive = [around] { return around->alive.Ask(); };
  options.on_disconnected = [around] {
    around->keeper_lost = true;
    kill(getpid(), SIGTERM);
  };
  auto keeper = config.keeper_fd.has_value() ? KeeperClient::FromFd(UniqueFd(*config.keeper_fd), options)
                                             : KeeperClient::FromPath(config.keeper_socket, options);
  if (!keeper.ok()) return keeper.status();
  KeeperInheritance inheritance = (*keeper)->TakeInheritance();
  around->inherited_listener = std::move(inheritance.listening_socket);
  around->listen_fd = around->inherited_listener.get();
  around->keeper_vault = std::make_unique<KeeperVault>(keeper->get(), std::move(inheritance));
  KeeperClient* const client = keeper->get();
  around->spawner = std::make_unique<KeeperLoaderSpawner>(
      [client](const std::vector<std::string>& arguments, int request_fd) {
        return client->SpawnLoader(arguments, request_fd);
      },
      [client](pid_t pid) { return client->DetachLoader(pid); });
  around->keeper = *std::move(keeper);
  return absl::OkStatus();
}

absl::Status StandAlone(const BrokerConfig& config, Surroundings* around) {
  around->spawner = NewProcessLoaderSpawner(config.loader_path);
  if (config.listen_fd.has_value()) {  // it belongs to whoever started this process
    around->listen_fd = *config.listen_fd;
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(around->own_listener, Listener::Create({.path = config.socket,
                                                           .mode = config.socket_mode,
                                                           .group = config.socket_group,
                                                           .create_folder = config.create_socket_folder}));
  around->listen_fd = around->own_listener->fd();
  return absl::OkStatus();
}

absl::Status Serve(const BrokerConfig& config) {
  DeviceCatalog devices({.wanted = config.devices, .build_has_kernels = WEIGHTBROKER_HAS_KERNELS != 0});
  Surroundings around;
  RETURN_IF_ERROR(HasKeeper(config) ? JoinKeeper(config, &around) : StandAlone(config, &around));
  if (config.names_gpus()) RETURN_IF_ERROR(devices.Check());
  BrokerOptions options = MakeOptions(config, around, &devices);
  ASSIGN_OR_RETURN(options.architectures, ReadArchitectures(config.architecture_dir));
  ASSIGN_OR_RETURN(const std::unique_ptr<Broker> broker, Broker::Start(std::move(options), around.listen_fd));
  const AliveProbe::Scope asked(&around.alive, broker.get());
  if (around.keeper != nullptr) RETURN_IF_ERROR(around.keeper->Ready());
  Log(LogLevel::kInfo, "broker.ready",
      {{"socket", config.socket},
       {"version", WEIGHTBROKER_VERSION},
       {"keeper", around.keeper != nullptr ? "true" : "false"},
       {"metrics", config.metrics_port.has_value() ? absl::StrCat("127.0.0.1:", broker->metrics_port()) : "none"},
       {"model_roots", absl::StrCat(config.model_roots.size())}});
  const std::string signal = ServeUntilSignal(*broker);
  Log(LogLevel::kInfo, "broker.draining", {{"cause", around.keeper_lost ? "the keeper has gone" : signal}});
  // Not joined: it waits for a signal that need not come. Without it the drain goes on to its end.
  auto second_signal = StartThread("the second signal", [] {
    Log(LogLevel::kWarning, "broker.killed", {{"signal", WaitForSignal(EndSignals())}});
    _exit(kExitKilled);
  });
  if (second_signal.ok()) second_signal->detach();
  broker->Shutdown();
  // gRPC, which is taken down next, then waits for ever if once it could not start a thread (1.51, seen with a limit of
  // processes that was used up for a while).
  ExitUnlessEndedWithin(kTakeDownLimit, "broker.stuck");
  if (!around.keeper_lost) return absl::OkStatus();
  return MakeError(Reason::kServiceUnavailable,
                   "the keeper has gone: engines go on with what they have mapped; start the service anew");
}

// Of --check_config: what the start would say of the desired state, and the configuration's own reader does not know,
// which has no protobuf.
absl::StatusOr<BrokerConfig> CheckDesired(absl::StatusOr<BrokerConfig> config) {
  if (!config.ok() || !config->check_config || config->desired_file.empty()) return config;
  std::vector<std::string> roots;
  for (const ConfiguredModelRoot& root : config->model_roots) roots.push_back(root.name);
  RETURN_IF_ERROR(CheckDesiredFile(RealFileSystem(), config->desired_file, roots));
  return config;
}

int Run(const BrokerConfig& config) {
  SetLogLevel(config.log_level);
  SetLogFormat(config.log_format);
  TakeGrpcLog();
  absl::Status status = RaiseFdLimitTo(kLeastOpenFiles).status();
  if (status.ok()) status = Serve(config);
  if (!status.ok()) {
    Log(LogLevel::kError, "broker.failed", {{"message", std::string(status.message())}});
    return HasReason(status, Reason::kConfigurationInvalid) ? kExitUsage : kExitFailed;
  }
  Log(LogLevel::kInfo, "broker.stopped");
  return 0;
}

}  // namespace
}  // namespace weightbroker

int main(int argc, char** argv) {
  weightbroker::SetLogProgram("broker");
  weightbroker::BlockSignals();
  const auto config = weightbroker::CheckDesired(weightbroker::ParseBrokerConfig(argc, argv));
  if (const auto code = weightbroker::AnswerWithoutServing(weightbroker::kProgram, config); code.has_value()) {
    return *code;
  }
  return weightbroker::Run(*config);
}
