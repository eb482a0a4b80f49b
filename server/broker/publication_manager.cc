#include "server/broker/publication_manager.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/random_bytes.h"
#include "common/base/status_macros.h"
#include "common/base/thread.h"

namespace weightbroker {
namespace {

constexpr size_t kTokenBytes = 32;

absl::Status ShuttingDown() {
  return MakeError(Reason::kDraining, "the service is shutting down; offer to publish again when it is back");
}

internal::v1::LoadRequest MakeRequest(const PublicationFacts& facts) {
  internal::v1::LoadRequest request;
  ToProto(facts.set->identity(), &request);
  *request.mutable_spec() = facts.set->spec();
  request.set_fingerprint(facts.set->fingerprint().hash);
  internal::v1::RankPlacement& rank = *request.add_ranks();
  rank.set_rank(facts.place.rank);
  rank.set_device(facts.place.device);
  request.set_handle_kind(facts.set->placement().handle_kind);
  internal::v1::PublishOrder& order = *request.mutable_publish();
  if (facts.promise.has_value()) *order.mutable_promise() = *facts.promise;
  return request;
}

absl::StatusOr<RankPlacement> FindPlace(const Placement& placement, int32_t rank) {
  for (const RankPlacement& place : placement.ranks) {
    if (place.rank == rank) return place;
  }
  return MakeError(Reason::kRankNotHere,
                   absl::StrCat("rank ", rank, " is to be published, but this service holds ",
                                JoinRanks(placement.ranks), " of ", placement.world_size),
                   {{"rank", absl::StrCat(rank)}, {"held_ranks", JoinRanks(placement.ranks)}});
}

void LogEnd(const PublicationFacts& facts, const absl::Status& result) {
  LogFields fields = {{"publication", absl::StrCat(-facts.id)},
                      {"fingerprint", facts.set->fingerprint().hash},
                      {"rank", absl::StrCat(facts.place.rank)}};
  if (result.ok()) return Log(LogLevel::kInfo, "publish.committed", fields);
  fields.emplace_back("reason", GetErrorDetails(result).reason);
  fields.emplace_back("message", std::string(result.message()));
  Log(LogLevel::kWarning, "publish.given_up", fields);
}

}  // namespace

PublicationManager::PublicationManager(PublicationManagerOptions options) : options_(std::move(options)) {}

PublicationManager::~PublicationManager() { Shutdown(); }

absl::StatusOr<PublicationManager::Begun> PublicationManager::Begin(PublishRequest request) {
  JoinFinished();
  MutexLock lock(mutex_);
  if (shut_down_) return ShuttingDown();
  // Under the lock, so that nobody finds a new set that has no publisher yet.
  ASSIGN_OR_RETURN(const Registry::Begun begun, options_.registry->Begin(request.set));
  if (begun.is_new) published_.push_back(std::make_shared<PublishedSet>(PublishedSet{.set = begun.set}));
  const PublishedSetRef published = FindPublished(begun.set);
  if (published == nullptr || published->publications.count(request.rank) > 0) return Begun{begun.set, nullptr};
  auto publication = Start(published, request);
  if (publication.ok()) return Begun{begun.set, *std::move(publication)};
  if (begun.is_new) {
    published->ended = true;
    published_.remove(published);
    options_.registry->Fail(begun.set, publication.status());
  }
  return publication.status();
}

// Null for a set that is not being published: it is resident, or goes.
PublicationManager::PublishedSetRef PublicationManager::FindPublished(const WeightSetRef& set) const {
  const auto found = std::find_if(published_.begin(), published_.end(),
                                  [&](const PublishedSetRef& published) { return published->set == set; });
  return found == published_.end() ? nullptr : *found;
}

absl::Status PublicationManager::CheckRoom() const {
  if (running_.size() < static_cast<size_t>(options_.max_publications)) return absl::OkStatus();
  return MakeError(Reason::kTooManyRequests,
                   absl::StrCat(running_.size(), " publications are under way, the most that there may be"),
                   {{"limit", absl::StrCat(options_.max_publications)}});
}

absl::StatusOr<std::shared_ptr<Publication>> PublicationManager::Start(const PublishedSetRef& published,
                                                                       const PublishRequest& request) {
  RETURN_IF_ERROR(CheckRoom());
  ASSIGN_OR_RETURN(const RankPlacement place, FindPlace(published->set->placement(), request.rank));
  const auto running = std::make_shared<Running>();
  running->published = published;
  std::shared_ptr<const PublisherProcess> publisher;
  if (published->set->placement().handle_kind != v1::HANDLE_KIND_HOST_MEMFD) {
    publisher = std::make_shared<const PublisherProcess>(PublisherProcess::Find(request.pid));
  }
  running->publication = std::make_shared<Publication>(
      options_.registry, PublicationFacts{.set = published->set,
                                          .place = place,
                                          .uid = request.uid,
                                          .publisher = std::move(publisher),
                                          .token = RandomBytes(kTokenBytes),
                                          .id = --last_id_,
                                          .promise = request.promise,
                                          .deadline = std::chrono::steady_clock::now() + options_.timeout,
                                          .check_gpu_fd = options_.check_gpu_fd});
  ASSIGN_OR_RETURN(running->thread, StartThread("following a publication", [this, running] { Follow(running); }));
  published->publications[request.rank] = running->publication;
  running_.push_back(running);
  return running->publication;
}

// Spawns from the publication's own thread: a child that asks to die with its parent dies with the thread that started
// it.
void PublicationManager::Follow(const RunningRef& running) {
  Publication& publication = *running->publication;
  const PublicationFacts& facts = publication.facts();
  auto shard = publication.Run(*options_.spawner, MakeRequest(facts), options_.heartbeat);
  absl::Status result = shard.status();
  if (shard.ok()) result = AddShard(running->published, *std::move(shard));
  LogEnd(facts, result);
  if (!result.ok()) GiveUp(running->published, result);
  if (options_.on_ended) options_.on_ended(facts);
  publication.FinishCommit(result);
  if (result.ok()) WaitForOtherRanks(running);
  MutexLock lock(mutex_);
  running->finished = true;
  changed_.NotifyAll();
}

void PublicationManager::WaitForOtherRanks(const RunningRef& running) {
  const auto deadline = running->publication->facts().deadline;
  {
    MutexLock lock(mutex_);
    while (!running->published->ended && std::chrono::steady_clock::now() < deadline) {
      changed_.WaitUntil(mutex_, deadline);
    }
  }
  GiveUp(running->published,
         MakeError(Reason::kPublisherGone, "not every rank was committed in time; offer to publish the set again"));
}

absl::Status PublicationManager::AddShard(const PublishedSetRef& published, std::shared_ptr<const Shard> shard) {
  std::vector<std::shared_ptr<const Shard>> all;
  {
    MutexLock lock(mutex_);
    if (published->ended) {
      return MakeError(Reason::kPublisherGone, "the publisher of another rank ended before it committed");
    }
    published->shards[shard->rank] = std::move(shard);
    if (published->shards.size() < published->set->placement().ranks.size()) return absl::OkStatus();
    for (auto& [rank, one] : published->shards) all.push_back(std::move(one));
    published->shards.clear();
    published->ended = true;
    published_.remove(published);
    changed_.NotifyAll();
  }
  const absl::Status resident = options_.registry->MakeResident(published->set, std::move(all), /*read_bytes=*/0);
  if (resident.ok()) {
    Log(LogLevel::kInfo, "publish.resident", DescribeForLog(options_.registry->Describe(published->set)));
  } else {
    options_.registry->Fail(published->set, resident);
  }
  if (options_.on_finished) options_.on_finished(published->set, resident);
  return resident;
}

void PublicationManager::GiveUp(const PublishedSetRef& published, const absl::Status& cause) {
  std::map<int32_t, std::shared_ptr<Publication>> others;
  std::map<int32_t, std::shared_ptr<const Shard>> shards;  // go after the lock
  {
    MutexLock lock(mutex_);
    if (published->ended) return;
    published->ended = true;
    published_.remove(published);
    others.swap(published->publications);
    shards.swap(published->shards);
    changed_.NotifyAll();
  }
  for (const auto& [rank, publication] : others) {
    publication->End(MakeError(Reason::kPublisherGone,
                               absl::StrCat("the publication of another rank ended: ", std::string(cause.message()))));
  }
  shards.clear();
  options_.registry->Fail(published->set, cause);
  if (options_.on_finished) options_.on_finished(published->set, cause);
}

absl::StatusOr<std::shared_ptr<Publication>> PublicationManager::Find(const std::string& token, uid_t uid) const {
  MutexLock lock(mutex_);
  for (const RunningRef& running : running_) {
    const PublicationFacts& facts = running->publication->facts();
    if (!running->finished && facts.uid == uid && facts.token == token) return running->publication;
  }
  return MakeError(Reason::kPublicationUnknown,
                   "no publication under way has this token: it has ended, or the token is not this caller's");
}

void PublicationManager::Abandon(const std::shared_ptr<Publication>& publication) {
  const absl::Status cause = MakeError(Reason::kPublisherGone,
                                       "the engine that was publishing the set left before it was resident; offer to "
                                       "publish it");
  publication->End(cause);
  if (!publication->committed()) return;  // its thread gives up the set once its memory is back
  PublishedSetRef published;
  {
    MutexLock lock(mutex_);
    published = FindPublished(publication->facts().set);
  }
  if (published != nullptr) GiveUp(published, cause);
}

void PublicationManager::Cancel(const WeightSetRef& set, const absl::Status& cause) {
  EndAndWait([&](const Running& running) { return running.published->set == set; }, cause);
}

void PublicationManager::Shutdown() {
  {
    MutexLock lock(mutex_);
    shut_down_ = true;
  }
  EndAndWait([](const Running&) { return true; }, ShuttingDown());
}

void PublicationManager::EndAndWait(const std::function<bool(const Running&)>& concerns, const absl::Status& cause) {
  std::vector<RunningRef> ending;
  {
    MutexLock lock(mutex_);
    std::copy_if(running_.begin(), running_.end(), std::back_inserter(ending),
                 [&](const RunningRef& running) { return concerns(*running); });
  }
  for (const RunningRef& running : ending) {
    running->publication->End(cause);
    if (running->publication->committed()) GiveUp(running->published, cause);
  }
  {
    MutexLock lock(mutex_);
    const auto is_over = [](const RunningRef& running) { return running->finished; };
    while (!std::all_of(ending.begin(), ending.end(), is_over)) changed_.Wait(mutex_);
  }
  JoinFinished();
}

void PublicationManager::JoinFinished() {
  std::list<RunningRef> finished;
  {
    MutexLock lock(mutex_);
    for (auto it = running_.begin(); it != running_.end();) {
      const auto next = std::next(it);
      if ((*it)->finished) finished.splice(finished.end(), running_, it);
      it = next;
    }
  }
  for (const RunningRef& running : finished) running->thread.join();
}

}  // namespace weightbroker
