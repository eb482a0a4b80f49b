// One rank of a weight set that an engine publishes, as the broker sees it: the loader that makes and seals its memory,
// and the publisher's calls, which are handed on to it.
//
//   auto publication = std::make_shared<Publication>(registry, set, place, uid, promise, deadline);
//   publication->Allocate({1 << 30}, [](absl::StatusOr<WritableMemory> memory) { ... });    // at once or later
//   auto shard = publication->Run(spawner, heartbeat);         // on a thread of its own: until committed, or the cause
//
// Thread-safe. Callbacks are called once, without any lock held, from Run's thread or the caller's.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/mutex.h"
#include "common/base/unique_fd.h"
#include "server/broker/loader_spawner.h"
#include "server/broker/registry.h"
#include "weightbroker/internal/v1/loader.pb.h"

namespace weightbroker {

// Slabs that a publisher may write to.
struct WritableMemory {
  int32_t first_slab = 0;  // how many the publication had before
  std::vector<v1::Slab> slabs;
  std::shared_ptr<const std::vector<UniqueFd>> fds;  // one a slab, open for writing; none of CUDA_IPC
};

// What is known of a publication from its start.
struct PublicationFacts {
  WeightSetRef set;
  RankPlacement place;
  uid_t uid = 0;                                                // of the publisher
  std::shared_ptr<const PublisherProcess> publisher = nullptr;  // of a set on a GPU
  std::string token;                                            // names it in calls; a capability
  int64_t id = 0;                                               // for tickets and the log; below 0, where no lease's is
  std::optional<v1::PublishPromise> promise;
  std::chrono::steady_clock::time_point deadline;  // to be committed until then
  GpuFdCheck check_gpu_fd = CheckGpuMemoryFd;
};

class Publication {
 public:
  using AllocateDone = std::function<void(absl::StatusOr<WritableMemory>)>;
  using ShardOr = absl::StatusOr<std::shared_ptr<const Shard>>;
  using CommitDone = std::function<void(const absl::Status&)>;

  Publication(std::shared_ptr<Registry> registry, PublicationFacts facts)
      : registry_(std::move(registry)), facts_(std::move(facts)) {}

  const PublicationFacts& facts() const { return facts_; }
  // Whether Run has given the shard, or is about to: End comes too late.
  bool committed() const {
    MutexLock lock(mutex_);
    return committed_;
  }

  // How long the loader took to take the digests, once committed.
  double digest_seconds() const {
    MutexLock lock(mutex_);
    return digest_seconds_;
  }

  // Starts the loader and follows it until the shard is committed, or the publication ends: with what End was given,
  // PUBLISHER_GONE after the deadline, LOADER_FAILED, or the loader's own error. The memory is the loader's and the
  // publisher's alone until then. Of CUDA_IPC the loader stays as the exporter that the shard has. Called once.
  ShardOr Run(LoaderSpawner& spawner, const internal::v1::LoadRequest& request, std::chrono::milliseconds heartbeat);

  // Has memory granted and slabs made; it may be asked for before Run is called. MEMORY_EXHAUSTED, INVALID_ARGUMENT for
  // sizes that cannot be, TOO_MANY_REQUESTS while another call for this publication is under way or it would have too
  // many slabs, or why it has ended.
  void Allocate(const std::vector<int64_t>& slab_bytes, AllocateDone done);

  // Has the shard made of what `manifest` says. `done` is called by FinishCommit once Run has given the shard, or with
  // the reason why it is refused: STILL_WRITABLE, MANIFEST_INVALID, PROMISE_BROKEN, which leave the publication open,
  // or as Allocate.
  void Commit(const std::string& manifest, CommitDone done);

  // To be called once, with what has become of the shard that Run gave.
  void FinishCommit(const absl::Status& result);

  // Ends it with `cause`, unless its shard has been given: the loader is killed, and calls under way are told.
  void End(const absl::Status& cause);

 private:
  // The call under way.
  struct Pending {
    internal::v1::LoadCommand command;
    UniqueFd manifest;          // with commit
    int64_t granted_bytes = 0;  // with allocate
    AllocateDone allocate_done;
    CommitDone commit_done;
  };

  ShardOr StartAndFollow(LoaderSpawner& spawner, const internal::v1::LoadRequest& request,
                         std::chrono::milliseconds heartbeat);
  absl::StatusOr<internal::v1::LoadEvent> NextEvent(std::chrono::milliseconds heartbeat, std::vector<UniqueFd>* fds);
  ShardOr OnSealed(const internal::v1::LoadSealed& sealed, std::vector<UniqueFd> fds);
  void OnProgress(const internal::v1::LoadProgress& progress);
  absl::StatusOr<std::shared_ptr<const Exporter>> KeepExporter() const;
  absl::Status OnAllocated(const internal::v1::SlabsAllocated& allocated, std::vector<UniqueFd> fds);
  absl::Status OnRefused(const absl::Status& why);
  absl::Status CheckOpen() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckOpenNow() const;
  absl::Status Submit(Pending* pending);
  absl::Status SendPending() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<Pending> TakePending() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return std::exchange(pending_, std::nullopt);
  }
  void Reject(Pending pending, const absl::Status& why);
  absl::Status DescribeDeath();

  const std::shared_ptr<Registry> registry_;
  const PublicationFacts facts_;

  // Of Run's thread alone.
  int control_fd_ = -1;
  std::shared_ptr<LoaderProcess> process_;
  bool loader_failed_ = false;  // it has said so, and ends by itself
  int64_t filled_bytes_ = 0;    // reported so far

  mutable Mutex mutex_;
  UniqueFd control_socket_ ABSL_GUARDED_BY(mutex_);                // to the loader, while Run runs
  std::shared_ptr<LoaderProcess> loader_ ABSL_GUARDED_BY(mutex_);  // likewise
  std::optional<Pending> pending_ ABSL_GUARDED_BY(mutex_);
  int32_t slab_count_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);      // not ok once it has ended without a shard
  bool committed_ ABSL_GUARDED_BY(mutex_) = false;  // the shard has been given
  double digest_seconds_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace weightbroker
