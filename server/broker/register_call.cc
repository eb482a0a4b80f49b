#include "server/broker/register_call.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/plan/plan.h"
#include "server/broker/placement.h"
#include "server/broker/spec_resolution.h"

namespace weightbroker {
namespace {

v1::RegisterResponse ProgressResponse(const WeightSetEntry& set, const WeightSetView& view) {
  v1::RegisterResponse response;
  v1::RegisterProgress& progress = *response.mutable_progress();
  progress.set_phase(view.state);
  progress.set_done_bytes(view.done_bytes);
  progress.set_total_bytes(view.total_bytes);
  progress.set_rate_bytes_per_second(view.rate_bytes_per_second);
  progress.set_fingerprint(set.fingerprint().hash);
  return response;
}

}  // namespace

void RegisterCall::Start() {
  absl::Status status = record().CheckCaller();
  if (status.ok() && !context_.workers->TrySubmit([self = Self()] { self->Run(); })) status = WorkersBusyError();
  if (!status.ok()) End(status);
}

void RegisterCall::Run() {
  absl::StatusOr<WeightSetRef> set = FindOrLoad();
  if (!set.ok()) {
    End(set.status());
    return;
  }
  set_ = *std::move(set);
  if (request_.wait()) {
    subscription_ = context_.registry->Subscribe(set_, [weak = weak_from_this()] {
      if (const auto self = std::static_pointer_cast<RegisterCall>(weak.lock())) self->OnChange();
    });
  }
  OnChange();
}

absl::StatusOr<WeightSetRef> RegisterCall::FindOrLoad() {
  ASSIGN_OR_RETURN(const v1::WeightSpec spec, CompleteSpec(request_.spec()));
  ASSIGN_OR_RETURN(const Placement placement, PlaceRanks(request_, WorldSize(spec), context_.devices));
  ASSIGN_OR_RETURN(ResolvedSpec resolved, ResolveSpec(context_, request_.spec(), request_.environment()));
  ASSIGN_OR_RETURN(WeightSetRef set,
                   context_.loads->Load({resolved.spec, resolved.environment, std::move(resolved.fingerprint),
                                         resolved.identity, placement}));
  RETURN_IF_ERROR(CheckPlacement(request_, placement, set->placement()));
  Log(LogLevel::kInfo, "register",
      {{"fingerprint", set->fingerprint().hash},
       {"model", set->spec().model()},
       {"ranks", JoinRanks(set->placement().ranks)},
       {"state", StateName(context_.registry->View(set).state)},
       {"uid", absl::StrCat(record().peer().uid)},
       {"peer_pid", absl::StrCat(record().peer().pid)}});
  return set;
}

// Called for each change of the set, from whichever thread caused it.
void RegisterCall::OnChange() {
  const WeightSetView view = context_.registry->View(set_);
  if (view.state == v1::WEIGHT_SET_STATE_FAILED) {
    End(view.failure);
  } else if (view.state == v1::WEIGHT_SET_STATE_RELEASED) {
    End(MakeError(Reason::kCancelled, "the weight set was unregistered while this call waited for it",
                  {{"fingerprint", set_->fingerprint().hash}}));
  } else if (view.state == v1::WEIGHT_SET_STATE_RESIDENT || !request_.wait()) {
    v1::RegisterResponse response;
    *response.mutable_weight_set() = context_.registry->Describe(set_);
    SendAndEnd(std::move(response), absl::OkStatus());
  } else {
    SendLatest(ProgressResponse(*set_, view));
  }
}

}  // namespace weightbroker
