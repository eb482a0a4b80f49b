// The publications under way: at most one for each rank of a weight set, each with a loader and a thread that follows
// it. The set is resident once every rank that is held here has been committed; one that ends before that ends the
// others, and nothing is left.
//
//   ASSIGN_OR_RETURN(auto begun, publications.Begin({std::move(set), rank, uid, promise}));
//   if (begun.publication == nullptr) ...                      // somebody else publishes it, or it is there: follow it
//   begun.publication->Allocate(sizes, done);
//   ...
//   ASSIGN_OR_RETURN(auto publication, publications.Find(token, uid));     // PUBLICATION_UNKNOWN
//
// Thread-safe.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/mutex.h"
#include "server/broker/loader_spawner.h"
#include "server/broker/publication.h"
#include "server/broker/registry.h"

namespace weightbroker {

struct PublicationManagerOptions {
  std::shared_ptr<Registry> registry;
  LoaderSpawner* spawner = nullptr;                          // must outlive the manager
  int max_publications = 64;                                 // ranks under way at once; more are refused
  std::chrono::milliseconds timeout{std::chrono::hours(1)};  // from Begin to Commit
  std::chrono::milliseconds heartbeat{250};
  GpuFdCheck check_gpu_fd = CheckGpuMemoryFd;
  // Called when a set has been published, or given up, with its result, from a publication's thread. May be empty.
  std::function<void(const WeightSetRef& set, const absl::Status& result)> on_finished = {};
  // Called when a publication ends, however, with its facts. May be empty.
  std::function<void(const PublicationFacts& facts)> on_ended = {};
};

// What is to be published, and by whom.
struct PublishRequest {
  NewWeightSet set;
  int32_t rank = 0;
  uid_t uid = 0;
  pid_t pid = 0;  // 0 if it is in a PID namespace that this process does not see
  std::optional<v1::PublishPromise> promise = {};
};

class PublicationManager {
 public:
  explicit PublicationManager(PublicationManagerOptions options);
  ~PublicationManager();  // shuts down
  PublicationManager(const PublicationManager&) = delete;
  PublicationManager& operator=(const PublicationManager&) = delete;

  struct Begun {
    WeightSetRef set;
    std::shared_ptr<Publication> publication;  // null: the caller is not the publisher
  };
  // Makes the caller the publisher of its rank, unless the set is resident or that rank has one. Fails as
  // Registry::Begin does, with RANK_NOT_HERE for a rank that is not held here, and with TOO_MANY_REQUESTS.
  absl::StatusOr<Begun> Begin(PublishRequest request);

  // The publication under way that has this token. PUBLICATION_UNKNOWN if there is none, or it is another user's.
  absl::StatusOr<std::shared_ptr<Publication>> Find(const std::string& token, uid_t uid) const;

  // The publisher has left: the publication ends with PUBLISHER_GONE, unless the set is resident. One that waits for
  // other ranks only ends the set.
  void Abandon(const std::shared_ptr<Publication>& publication);

  // Ends whatever is under way for `set` with `cause`, and waits for its end.
  void Cancel(const WeightSetRef& set, const absl::Status& cause);

  // Begins no more, ends those under way with DRAINING and waits for them.
  void Shutdown();

 private:
  // One weight set that is being published.
  struct PublishedSet {
    WeightSetRef set = {};
    std::map<int32_t, std::shared_ptr<Publication>> publications = {};  // by rank; committed ones included
    std::map<int32_t, std::shared_ptr<const Shard>> shards = {};        // by rank, committed
    bool ended = false;                                                 // resident, or given up
  };
  using PublishedSetRef = std::shared_ptr<PublishedSet>;

  struct Running {
    std::shared_ptr<Publication> publication;
    PublishedSetRef published;
    bool finished = false;
    std::thread thread;
  };
  using RunningRef = std::shared_ptr<Running>;

  absl::StatusOr<std::shared_ptr<Publication>> Start(const PublishedSetRef& published, const PublishRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Follow(const RunningRef& running);
  absl::Status CheckRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  PublishedSetRef FindPublished(const WeightSetRef& set) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WaitForOtherRanks(const RunningRef& running);
  absl::Status AddShard(const PublishedSetRef& published, std::shared_ptr<const Shard> shard);
  void GiveUp(const PublishedSetRef& published, const absl::Status& cause);
  void EndAndWait(const std::function<bool(const Running&)>& concerns, const absl::Status& cause);
  void JoinFinished();

  const PublicationManagerOptions options_;

  mutable Mutex mutex_;
  CondVar changed_;  // a publication has finished, or a set's publishing has ended
  std::list<RunningRef> running_ ABSL_GUARDED_BY(mutex_);         // the fields of each, too
  std::list<PublishedSetRef> published_ ABSL_GUARDED_BY(mutex_);  // not ended; the fields of each, too
  int64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace weightbroker
