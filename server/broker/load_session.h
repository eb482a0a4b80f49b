// One load, as the broker sees it: the conversation with one loader over its control socket, from the plan to the
// sealed shards, one for each rank. The loader parses files that nobody vouches for, so nothing it says is taken on
// trust.
//
//   LoadSession session(registry, set, std::move(loader));
//   const absl::Status result = session.Run();     // the set is RESIDENT, or the cause
//
// Run blocks; Cancel may be called from another thread.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/base/mutex.h"
#include "common/base/socket.h"
#include "server/broker/loader_spawner.h"
#include "server/broker/registry.h"
#include "weightbroker/internal/v1/loader.pb.h"

namespace weightbroker {

class LoadSession {
 public:
  // A loader that makes no progress for `stall_timeout` is killed; never if that is 0. Progress is a plan, a further
  // phase, or more bytes.
  LoadSession(std::shared_ptr<Registry> registry, WeightSetRef set, SpawnedLoader loader,
              std::chrono::milliseconds heartbeat, std::chrono::milliseconds stall_timeout,
              GpuFdCheck check_gpu_fd = CheckGpuMemoryFd);

  // Follows the load to its end. Ok: the set is RESIDENT. Otherwise the caller must Fail the set; the cause is the
  // loader's own, MEMORY_EXHAUSTED, LOADER_FAILED (it died: how, if known), LOADER_STALLED, PROTOCOL_ERROR, or what
  // Cancel was given.
  absl::Status Run();

  // What the loader says of how it went; of use once Run has succeeded.
  const internal::v1::LoadReport& report() const { return report_; }

  // Kills the loader, and Run gives `cause`. Once the loader has handed over everything it is too late: the set becomes
  // RESIDENT with its exporter unharmed, and is released like any other; Run gives `cause` only if that fails.
  void Cancel(const absl::Status& cause);

 private:
  absl::Status Converse();
  absl::StatusOr<internal::v1::LoadEvent> NextEvent(std::vector<UniqueFd>* fds);
  absl::Status OnPlanned(const internal::v1::LoadPlanned& planned);
  // Whether it was the last one.
  absl::StatusOr<bool> OnSealed(const internal::v1::LoadSealed& sealed, std::vector<UniqueFd> fds);
  // Settles that everything has been handed over before the load was cancelled; else gives the cause.
  absl::Status TakeOver();
  absl::Status OnProgress(const internal::v1::LoadProgress& progress);
  void LogProgress(const WeightSetView& view);
  absl::Status CheckNotStalled();
  absl::StatusOr<std::shared_ptr<const Exporter>> KeepExporter();
  absl::Status DescribeDeath();

  const std::shared_ptr<Registry> registry_;
  const WeightSetRef set_;
  const UniqueFd control_socket_;  // to the loader
  const std::shared_ptr<LoaderProcess> process_;
  const std::chrono::milliseconds heartbeat_;
  const std::chrono::milliseconds stall_timeout_;
  const GpuFdCheck check_gpu_fd_;
  MemoryPlan plan_;
  internal::v1::LoadReport report_;
  std::vector<std::shared_ptr<const Shard>> shards_;  // handed over so far, by rank
  bool loader_failed_ = false;                        // it has said so, and ends by itself
  std::chrono::steady_clock::time_point last_progress_;
  std::chrono::steady_clock::time_point last_logged_;

  Mutex mutex_;
  absl::Status cancelled_ ABSL_GUARDED_BY(mutex_);    // not ok once cancelled
  bool handed_over_ ABSL_GUARDED_BY(mutex_) = false;  // the loader is not to be killed any more by a Cancel
};

}  // namespace weightbroker
