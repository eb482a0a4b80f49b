// Checks resident bytes against their digests: when asked, on a schedule, and when an engine says that they differ. A
// shard that differs is put in quarantine; a check that fails itself is logged and counted, and changes nothing.
//
//   ScrubManager scrubs({.registry = registry, .spawner = spawner, .interval = 24h, .bytes_per_second = 1 << 30});
//   RETURN_IF_ERROR(scrubs.Scrub({{set, 0}}, 0, {on_progress, on_shard, on_done}));     // TOO_MANY_REQUESTS
//   scrubs.Report(set, 0);                                                              // an engine's word
//
// What is asked for waits for what was asked for before; the schedule runs beside it. Each is one loader at a time, and
// the cap is of each. Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "common/base/mutex.h"
#include "server/broker/scrub_run.h"
#include "weightbroker/v1/weight_broker_admin_service.pb.h"

namespace weightbroker {

struct ScrubManagerOptions {
  std::shared_ptr<Registry> registry;
  LoaderSpawner* spawner = nullptr;       // must outlive the manager
  std::chrono::milliseconds interval{0};  // from the end of one scheduled scrub to the next one's start; 0: none
  int64_t bytes_per_second = 0;           // 0: no cap
  std::chrono::milliseconds stall_timeout{600'000};
  size_t max_waiting = 16;  // scrubs that have been asked for
  // How long an engine's report of a shard is answered by the scrub that an earlier one started.
  std::chrono::milliseconds report_interval{60'000};
  // Called for each shard, from the scrub's thread. May be empty.
  std::function<void(const v1::ScrubbedShard& shard)> on_shard = {};
};

// One rank of a set. Does not keep its memory.
struct ShardRef {
  WeightSetRef set;
  int32_t rank = 0;
};

// Whoever asked for a scrub, called from the scrub's thread. Each may be empty.
struct ScrubObserver {
  std::function<void(const v1::ScrubProgress& progress)> on_progress = {};
  std::function<void(const v1::ScrubbedShard& shard)> on_shard = {};
  std::function<void()> on_done = {};
};

class ScrubManager {
 public:
  explicit ScrubManager(ScrubManagerOptions options);
  ~ScrubManager();  // shuts down
  ScrubManager(const ScrubManager&) = delete;
  ScrubManager& operator=(const ScrubManager&) = delete;

  // Checks these shards, one after the other. `bytes_per_second` is 0 for the manager's own cap. TOO_MANY_REQUESTS if
  // too many wait, DRAINING once it is shut down; then the observer is not called.
  absl::Status Scrub(std::vector<ShardRef> shards, int64_t bytes_per_second, ScrubObserver observer);

  // An engine says that the bytes of a shard differ. Whether a scrub has been started for it.
  bool Report(const ShardRef& shard);

  // Ends what is under way and starts no more.
  void Shutdown();

 private:
  struct Job {
    std::vector<ShardRef> shards;
    int64_t bytes_per_second = 0;
    ScrubObserver observer;
  };

  void RunAsked();
  void RunSchedule();
  void RunJob(const Job& job);
  v1::ScrubbedShard ScrubShard(const Job& job, const ShardRef& shard, v1::ScrubProgress* progress);
  v1::ScrubbedShard Conclude(const ShardRef& shard, const absl::StatusOr<internal::v1::ScrubResult>& result) const;
  std::shared_ptr<ScrubRun> Begin(Registry::PlacedShard shard, int64_t bytes_per_second);
  void End(const std::shared_ptr<ScrubRun>& run);

  const ScrubManagerOptions options_;

  Mutex mutex_;
  CondVar changed_;
  std::deque<Job> waiting_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<ScrubRun>> running_ ABSL_GUARDED_BY(mutex_);
  // When a report was answered with a scrub, by fingerprint, generation and rank.
  std::map<std::string, std::chrono::steady_clock::time_point> reported_ ABSL_GUARDED_BY(mutex_);
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;

  std::thread asked_;     // last: they use all of the above
  std::thread schedule_;  // not started without an interval
};

}  // namespace weightbroker
