#include "server/broker/scrub_call.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker {

void ScrubCall::Start() {
  if (const absl::Status status = StartScrub(); !status.ok()) End(status);
}

absl::Status ScrubCall::StartScrub() {
  RETURN_IF_ERROR(record().CheckCaller());
  if (request_.bytes_per_second() < 0) {
    return MakeError(Reason::kInvalidArgument,
                     absl::StrCat("bytes_per_second is ", request_.bytes_per_second(), "; 0 or more is allowed"),
                     {{"field", "bytes_per_second"}});
  }
  ASSIGN_OR_RETURN(std::vector<ShardRef> shards, FindShards());
  const auto weak = weak_from_this();
  const auto with_call = [weak](auto use) {
    if (const auto call = std::static_pointer_cast<ScrubCall>(weak.lock())) use(*call);
  };
  ScrubObserver observer;
  observer.on_progress = [with_call](const v1::ScrubProgress& progress) {
    v1::ScrubResponse response;
    *response.mutable_progress() = progress;
    with_call([&](ScrubCall& call) { call.SendLatest(std::move(response)); });
  };
  observer.on_shard = [with_call](const v1::ScrubbedShard& shard) {
    v1::ScrubResponse response;
    *response.mutable_shard() = shard;
    with_call([&](ScrubCall& call) { call.Send(std::move(response)); });
  };
  observer.on_done = [with_call] { with_call([](ScrubCall& call) { call.End(absl::OkStatus()); }); };
  return context_.scrubs->Scrub(std::move(shards), request_.bytes_per_second(), std::move(observer));
}

absl::StatusOr<std::vector<ShardRef>> ScrubCall::FindShards() const {
  std::vector<ShardRef> shards;
  WeightSetRef set;
  if (!request_.fingerprint().empty()) {
    ASSIGN_OR_RETURN(set, context_.registry->FindByPrefix(request_.fingerprint()));
  } else if (request_.has_rank()) {
    return MakeError(Reason::kInvalidArgument, "a rank is only chosen of one weight set: name its fingerprint",
                     {{"field", "rank"}});
  }
  if (set != nullptr) {
    // Whoever names a shard that cannot be checked is told why.
    const int32_t rank = request_.has_rank() ? request_.rank() : set->placement().ranks.front().rank;
    const absl::Status there = context_.registry->Look(set, rank, {}).status();
    if (!there.ok() && (request_.has_rank() || !HasReason(there, Reason::kQuarantined))) return there;
    if (request_.has_rank()) return std::vector<ShardRef>{{set, rank}};
  }
  for (const Registry::PlacedShard& shard : context_.registry->HealthyShards(set)) {
    shards.push_back({shard.set, shard.shard->rank});
  }
  if (shards.empty() && set != nullptr) RETURN_IF_ERROR(context_.registry->CheckNotQuarantined(set));
  return shards;
}

}  // namespace weightbroker
