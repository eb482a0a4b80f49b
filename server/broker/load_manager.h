// Runs the loads: one a fingerprint, each with a loader and a thread that follows it. A load goes on when whoever asked
// for it leaves, and when this broker ends: the next one starts it again from what the vault kept of it.
//
//   ASSIGN_OR_RETURN(WeightSetRef set, loads.Load({spec, environment, fingerprint, identity}));   // starts, or joins
//   auto subscription = registry->Subscribe(set, on_change);
//   ...
//   loads.Cancel(set, cause);                    // an operator's Unregister with force
//
// Thread-safe.
#pragma once

#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/mutex.h"
#include "server/broker/load_session.h"
#include "server/broker/loader_spawner.h"
#include "server/broker/reading_options.h"
#include "server/broker/registry.h"
#include "server/broker/vault.h"

namespace weightbroker {

struct LoadManagerOptions {
  std::shared_ptr<Registry> registry;
  LoaderSpawner* spawner = nullptr;                       // must outlive the manager
  ReadingOptions reading = {};                            // of each loader
  std::map<std::string, std::string> architectures = {};  // for each loader: file name to contents
  int max_concurrent_loads = 2;                           // loaders at once; further loads wait, in ALLOCATING
  int max_waiting_loads = 64;                             // beyond that they are refused
  std::chrono::milliseconds heartbeat{250};
  std::chrono::milliseconds stall_timeout{600'000};  // of a loader that makes no progress; 0: none
  int max_attempts = 20;  // brokers that have begun a load and ended: one that kills them is not tried for ever
  ShardVault* vault = &NoVault();  // must outlive the manager
  GpuFdCheck check_gpu_fd = CheckGpuMemoryFd;
  // Called at the end of each load whose loader could not read as it should have, from the load's thread: with
  // "no_io_uring" or "not_pinned". May be empty.
  std::function<void(std::string_view how)> on_degraded = {};
  // Called with what the loader says of how it went, at the end of each load that got to residency. May be empty.
  std::function<void(const internal::v1::LoadReport& report)> on_report = {};
  // Called at the end of each load, with its result, from the load's thread. May be empty.
  std::function<void(const WeightSetRef& set, const absl::Status& result)> on_finished = {};
};

class LoadManager {
 public:
  explicit LoadManager(LoadManagerOptions options);
  ~LoadManager();  // shuts down
  LoadManager(const LoadManager&) = delete;
  LoadManager& operator=(const LoadManager&) = delete;

  // The set with the request's fingerprint: resident, being loaded by somebody's request, or loaded for this one from
  // now on. Never waits for the load. Fails as Registry::Begin and ShardVault::KeepLoad do, and with TOO_MANY_REQUESTS.
  absl::StatusOr<WeightSetRef> Load(NewWeightSet request);

  // The same for a load that another broker had begun. One that has been begun too often is given up, with
  // LOADER_FAILED.
  absl::StatusOr<WeightSetRef> Resume(Adoption::Load load);

  // What a load for `request` would need; nothing is begun. Blocks while a loader reads headers. Fails as PlanLoad
  // does.
  absl::StatusOr<MemoryPlan> Plan(const NewWeightSet& request) const;

  // Ends the load of `set` with `cause` and waits until its memory is back. Does nothing if none is under way.
  void Cancel(const WeightSetRef& set, const absl::Status& cause);

  // Starts no more loads, ends those under way with DRAINING and waits for them. The vault keeps them.
  void Shutdown();

 private:
  struct Running {
    WeightSetRef set;
    internal::v1::LoadRequest request;
    absl::Status cancelled;                // before there was a session
    std::shared_ptr<LoadSession> session;  // while the loader runs
    bool loading = false;                  // counted in loading_
    bool finished = false;
    std::thread thread;
  };
  using RunningRef = std::shared_ptr<Running>;

  absl::StatusOr<WeightSetRef> Begin(NewWeightSet request, int32_t attempt);
  absl::Status CheckRoom(const std::string& fingerprint);
  absl::Status Start(const RunningRef& running);
  void Follow(const RunningRef& running);
  void ForgetLoad(const RunningRef& running, const absl::Status& result);
  absl::Status WaitForTurn(const RunningRef& running);
  void ReportDegraded(const WeightSetEntry& set, const internal::v1::LoadReport& report) const;
  absl::Status RunLoader(const RunningRef& running);
  void RequestCancel(const RunningRef& running, const absl::Status& cause) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void JoinFinished();

  const LoadManagerOptions options_;

  Mutex mutex_;
  CondVar changed_;                                        // a load has finished, or has been cancelled
  std::list<RunningRef> running_ ABSL_GUARDED_BY(mutex_);  // the fields of each, too
  int loading_ ABSL_GUARDED_BY(mutex_) = 0;
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace weightbroker
