#include "server/broker/load_session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

using internal::v1::LoadEvent;

// How long a loader that has said its last word may take to leave.
constexpr std::chrono::milliseconds kExitGrace(2000);

absl::Status Distrust(const std::string& what) {
  return MakeError(Reason::kProtocolError, absl::StrCat("the loader ", what));
}

}  // namespace

LoadSession::LoadSession(std::shared_ptr<Registry> registry, WeightSetRef set, SpawnedLoader loader,
                         std::chrono::milliseconds heartbeat)
    : registry_(std::move(registry)), set_(std::move(set)), loader_(std::move(loader)), heartbeat_(heartbeat) {}

absl::Status LoadSession::Run() {
  absl::Status result = Converse();
  if (!result.ok()) {
    loader_.process->Kill();  // it may be at work still, with memory that nobody will take
    loader_.process->WaitForEnd(kExitGrace);
    MutexLock lock(mutex_);
    return cancelled_.ok() ? result : cancelled_;
  }
  loader_.process->WaitForEnd(kExitGrace);
  return result;
}

void LoadSession::Cancel(const absl::Status& cause) {
  {
    MutexLock lock(mutex_);
    if (cancelled_.ok()) cancelled_ = cause;
  }
  loader_.process->Kill();
}

absl::Status LoadSession::Converse() {
  bool planned = false;
  while (true) {
    std::vector<UniqueFd> fds;
    ASSIGN_OR_RETURN(const LoadEvent event, NextEvent(&fds));
    if (!fds.empty() && !event.has_sealed()) return Distrust("sent descriptors before it was done");
    switch (event.event_case()) {
      case LoadEvent::kFailed: {
        const absl::Status failure = ParseRpcStatus(event.failed().SerializeAsString());
        return failure.ok() ? Distrust("said that it failed with code OK") : failure;
      }
      case LoadEvent::kPlanned:
        RETURN_IF_ERROR(OnPlanned(event.planned()));
        planned = true;
        break;
      case LoadEvent::kProgress:
        RETURN_IF_ERROR(registry_->ReportProgress(set_, event.progress().phase(), event.progress().done_bytes()));
        break;
      case LoadEvent::kSealed: {
        if (!planned) return Distrust("handed over a shard that it had not planned");
        ASSIGN_OR_RETURN(const bool is_last, OnSealed(event.sealed(), std::move(fds)));
        if (is_last) return registry_->MakeResident(set_, std::move(shards_), event.sealed().read_bytes());
        break;
      }
      case LoadEvent::EVENT_NOT_SET:
        return Distrust("sent a message without an event");
    }
  }
}

absl::StatusOr<LoadEvent> LoadSession::NextEvent(std::vector<UniqueFd>* fds) {
  while (true) {
    absl::StatusOr<SocketMessage> message = ReceiveMessage(loader_.control_socket.get(), heartbeat_);
    if (HasReason(message.status(), Reason::kDeadlineExceeded)) {
      registry_->ReportAlive(set_);
      continue;
    }
    if (!message.ok()) return message.status();
    if (message->closed) return DescribeDeath();
    LoadEvent event;
    if (!event.ParseFromString(message->bytes)) return Distrust("sent bytes that are not a LoadEvent");
    *fds = std::move(message->fds);
    return event;
  }
}

absl::Status LoadSession::OnPlanned(const internal::v1::LoadPlanned& planned) {
  ASSIGN_OR_RETURN(plan_, ReadPlan(planned));
  RETURN_IF_ERROR(registry_->GrantMemory(set_, plan_));
  Log(LogLevel::kInfo, "load.granted",
      {{"fingerprint", set_->fingerprint().hash},
       {"ranks", JoinRanks(set_->placement().ranks)},
       {"bytes", absl::StrCat(planned.slab_bytes())},
       {"tensors", absl::StrCat(planned.tensor_count())}});
  internal::v1::LoadCommand command;
  command.set_proceed(true);
  const absl::Status sent = SendMessage(loader_.control_socket.get(), command.SerializeAsString());
  return HasReason(sent, Reason::kServiceUnavailable) ? DescribeDeath() : sent;
}

absl::StatusOr<MemoryPlan> LoadSession::ReadPlan(const internal::v1::LoadPlanned& planned) const {
  const std::vector<RankPlacement>& ranks = set_->placement().ranks;
  const bool is_for_these = std::equal(
      planned.shards().begin(), planned.shards().end(), ranks.begin(), ranks.end(),
      [](const internal::v1::PlannedShard& shard, const RankPlacement& rank) { return shard.rank() == rank.rank; });
  if (!is_for_these) {
    return Distrust(absl::StrCat("planned ", planned.shards_size(), " shards, which are not ranks ", JoinRanks(ranks)));
  }
  MemoryPlan plan{.shards = {}, .read_bytes = planned.read_bytes()};
  for (size_t i = 0; i < ranks.size(); ++i) {
    const internal::v1::PlannedShard& shard = planned.shards(static_cast<int>(i));
    plan.shards.push_back({ranks[i].rank, ranks[i].device, shard.slab_bytes(), shard.tensor_count()});
  }
  return plan;
}

absl::StatusOr<bool> LoadSession::OnSealed(const internal::v1::LoadSealed& sealed, std::vector<UniqueFd> fds) {
  const ShardMemory& planned = plan_.shards[shards_.size()];
  if (sealed.rank() != planned.rank) {
    return Distrust(absl::StrCat("handed over rank ", sealed.rank(), " where rank ", planned.rank, " was due"));
  }
  if (static_cast<int>(fds.size()) != sealed.slabs_size() + 1) {
    return Distrust(
        absl::StrCat("handed over ", fds.size(), " descriptors for ", sealed.slabs_size(), " slabs and a manifest"));
  }
  if (sealed.tensor_count() != planned.tensor_count) {
    return Distrust(absl::StrCat("planned ", planned.tensor_count, " tensors for rank ", planned.rank,
                                 " and handed over ", sealed.tensor_count()));
  }
  UniqueFd manifest_fd = std::move(fds.back());
  fds.pop_back();
  auto shard = std::make_shared<Shard>();
  shard->rank = planned.rank;
  shard->device = planned.device;
  shard->handle_kind = set_->placement().handle_kind;
  shard->slabs = {sealed.slabs().begin(), sealed.slabs().end()};
  ASSIGN_OR_RETURN(shard->size_bytes, CheckSlabs(shard->slabs, fds));
  ASSIGN_OR_RETURN(shard->manifest,
                   Manifest::FromLoader({std::move(manifest_fd), sealed.manifest_bytes(), sealed.manifest_sha256()},
                                        shard->slabs, sealed.tensor_count()));
  shard->slab_fds = std::make_shared<const std::vector<UniqueFd>>(std::move(fds));
  shard->tensor_count = sealed.tensor_count();
  shards_.push_back(std::move(shard));
  return shards_.size() == plan_.shards.size();
}

absl::Status LoadSession::DescribeDeath() {
  const std::string how = loader_.process->WaitForEnd(kExitGrace);
  return MakeError(Reason::kLoaderFailed,
                   absl::StrCat("the loader ended without a result (", how.empty() ? "how is not known" : how,
                                "); its memory has been given back: see its log lines, and register again"),
                   {{"exit", how}});
}

}  // namespace weightbroker
