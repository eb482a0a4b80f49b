// The broker as a whole: registry, loads, services and the endpoint, wired together.
//
//   auto broker = Broker::Start({.model_roots = {{"models", "/srv/models"}}, .spawner = spawner.get()}, listener.fd());
//   if (!broker.ok()) return broker.status();                // one sentence
//   ... until SIGTERM ...
//   (*broker)->Shutdown();                                   // every stream told and finished, every loader gone
//
// Signals that the program handles must be blocked before Start: gRPC's threads inherit the mask. Thread-safe.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/file.h"
#include "common/memory/host_memory.h"
#include "common/memory/memory_limit.h"
#include "server/broker/clock.h"
#include "server/broker/device_catalog.h"
#include "server/broker/gpu_fault_watch.h"
#include "server/broker/loader_spawner.h"
#include "server/broker/model_resolver.h"
#include "server/broker/publish_gate.h"
#include "server/broker/reading_options.h"
#include "server/broker/vault.h"
#include "server/endpoint/access.h"

namespace weightbroker {

// What one client may take up, so that the others keep their share.
struct ClientCaps {
  int connections_per_uid = 512;      // 0: no limit
  int streams_per_connection = 1024;  // an engine holds one for each shard
  int calls_per_uid = 4096;           // under way, Export streams among them; 0: no limit
  int request_bytes = 1 << 20;        // requests are a spec and a few words
  int metadata_bytes = 8 << 10;
  std::chrono::milliseconds call_deadline{60'000};  // for a call to get its turn; 0: none
  std::chrono::milliseconds write_timeout{30'000};  // for a caller to read what is sent to it
};

struct BrokerOptions {
  std::vector<ModelRoot> model_roots;
  int64_t memory_limit_bytes = 0;                                    // on the host; 0 for no limit but the machine's
  MemoryLimit device_memory_limit;                                   // on each GPU
  bool evicts_idle = false;                                          // weight sets, where memory is missing
  ReadingOptions reading;                                            // of each loader
  int max_concurrent_loads = 2;                                      // further ones wait
  std::chrono::milliseconds publish_timeout{std::chrono::hours(1)};  // from a grant to Commit
  PublishQuantizations publish_quantizations;
  std::chrono::milliseconds loader_stall_timeout{600'000};  // without progress; 0: never kill for it
  bool exports_unverified = false;                          // weight sets whose files are gone
  std::map<std::string, std::string> architectures;         // file name to contents, besides those that are built in
  std::string desired_file;                                 // that says what is to be resident; empty for none
  std::optional<int> metrics_port;  // on loopback; 0 takes a free one; no metrics are served without it
  AccessPolicy access;
  std::string version = "unknown";
  LoaderSpawner* spawner = nullptr;  // must outlive the broker
  ShardVault* vault = &NoVault();    // must outlive the broker

  std::chrono::milliseconds ticket_lifetime{60'000};
  std::chrono::milliseconds handshake_timeout{2000};
  std::chrono::milliseconds idle_timeout{300'000};    // of a connection without calls
  std::chrono::milliseconds shutdown_timeout{2'000};  // for streams whose callers do not read
  std::chrono::milliseconds scrub_interval{0};        // between scheduled scrubs of all that is resident; 0: none
  int64_t scrub_bytes_per_second = 0;                 // 0: no cap
  ClientCaps caps;
  int worker_threads = 4;
  size_t max_waiting_calls = 64;  // for a worker; more are TOO_MANY_REQUESTS

  FileSystem* file_system = &RealFileSystem();
  std::function<HostMemory()> host_memory = [] { return ReadHostMemory(); };
  GpuFdCheck check_gpu_fd = CheckGpuMemoryFd;                  // another for tests without a GPU
  DeviceCatalog* devices = &DeviceCatalog::HostOnlyCatalog();  // must outlive the broker
  GpuFaultWatch::Open open_gpu_events = nullptr;               // faults of GPUs are not watched without it
  const Clock* clock = &RealClock();
};

class Broker {
 public:
  // Adopts what the vault has and serves on `listen_fd`, which stays the caller's and must outlive the broker.
  // CONFIGURATION_INVALID for roots that cannot be used, and for a wrong desired_file unless there is something to
  // adopt, which is served whatever that file says; SYSTEM_ERROR if gRPC or the metrics cannot be started.
  static absl::StatusOr<std::unique_ptr<Broker>> Start(BrokerOptions options, int listen_fd);

  ~Broker();  // shuts down
  Broker(const Broker&) = delete;
  Broker& operator=(const Broker&) = delete;

  // Accepts no more, tells every stream and finishes it, ends loads, and returns when all calls are over. Harmless
  // twice.
  void Shutdown();

  // Reads desired_file again. If it is wrong, what was desired stays so, and the log, the metrics and Health say why.
  void ReloadDesired();

  // Whether the registry's lock can be had and the endpoint's thread is at work. Waits for both: for the lock without a
  // limit, so that whoever asks must take too late an answer for a no. True once Shutdown has been called.
  bool IsAlive();

  // Where /metrics is served; 0 if it is not.
  int metrics_port() const;

 private:
  struct Parts;
  explicit Broker(std::unique_ptr<Parts> parts);

  std::unique_ptr<Parts> parts_;
};

}  // namespace weightbroker
