// One resident shard, checked by a loader in a process of its own: the broker touches no weights.
//
//   ScrubRun run(registry, set, shard, {.bytes_per_second = 0, .stall_timeout = 600s});
//   absl::StatusOr<internal::v1::ScrubResult> result = run.Run(spawner, on_progress);
//
// Run is called once. Cancel is thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "common/base/mutex.h"
#include "server/broker/loader_spawner.h"
#include "server/broker/registry.h"
#include "weightbroker/internal/v1/loader.pb.h"

namespace weightbroker {

struct ScrubLimits {
  int64_t bytes_per_second = 0;                      // 0: as fast as it goes
  std::chrono::milliseconds stall_timeout{600'000};  // without a word; 0: never
  std::chrono::milliseconds heartbeat{100};          // how soon it notices that the set is being released
};

class ScrubRun {
 public:
  ScrubRun(std::shared_ptr<Registry> registry, Registry::PlacedShard shard, ScrubLimits limits)
      : registry_(std::move(registry)), shard_(std::move(shard)), limits_(limits) {}

  // What the loader found; `on_progress` gets the bytes that have been read. Any error says nothing of the bytes:
  // EXPORTER_DEAD, CANCELLED if the set is being released or Cancel was called, LOADER_FAILED, LOADER_STALLED, or as
  // LoaderSpawner::Spawn and the loader itself fail.
  absl::StatusOr<internal::v1::ScrubResult> Run(LoaderSpawner& spawner,
                                                const std::function<void(int64_t done_bytes)>& on_progress);

  void Cancel();

 private:
  absl::Status Start(LoaderSpawner& spawner);
  absl::Status SendOrder();
  absl::StatusOr<internal::v1::ScrubResult> Follow(const std::function<void(int64_t)>& on_progress);
  absl::Status CheckGoesOn(std::chrono::steady_clock::time_point last_word);
  bool cancelled() const {
    MutexLock lock(mutex_);
    return cancelled_;
  }

  const std::shared_ptr<Registry> registry_;
  const Registry::PlacedShard shard_;
  const ScrubLimits limits_;

  // Of Run's thread alone.
  UniqueFd control_socket_;
  bool loader_failed_ = false;  // it has said so, and ends by itself

  mutable Mutex mutex_;
  std::shared_ptr<LoaderProcess> process_ ABSL_GUARDED_BY(mutex_);
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace weightbroker
