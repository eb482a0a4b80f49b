#include "server/broker/register_call.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/plan/engine_layout.h"
#include "common/plan/plan.h"
#include "server/broker/placement.h"
#include "server/broker/publisher_call.h"
#include "server/broker/register_plan.h"
#include "server/broker/spec_resolution.h"
#include "server/broker/timestamp.h"
#include "server/broker/wanted_set.h"

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
  if (view.seconds_left.has_value()) progress.set_seconds_left(*view.seconds_left);
  return response;
}

bool HasGone(v1::WeightSetState state) {
  return state == v1::WEIGHT_SET_STATE_DRAINING || state == v1::WEIGHT_SET_STATE_RELEASED;
}

}  // namespace

void RegisterCall::Start() {
  absl::Status status = record().CheckCaller(request_.has_publish() ? Operation::kPublish : Operation::kRegister);
  if (status.ok() && !context_.workers->TrySubmit([self = Self()] { self->Run(); })) status = WorkersBusyError();
  if (!status.ok()) End(status);
}

void RegisterCall::AnswerDryRun() {
  absl::StatusOr<v1::RegisterPlan> plan = PlanOnly();
  if (!plan.ok()) return End(plan.status());
  v1::RegisterResponse response;
  *response.mutable_plan() = *std::move(plan);
  SendAndEnd(std::move(response), absl::OkStatus());
}

absl::StatusOr<v1::RegisterPlan> RegisterCall::PlanOnly() const {
  ASSIGN_OR_RETURN(const ResolvedSpec resolved, CheckAndResolve());
  ASSIGN_OR_RETURN(const NewWeightSet wanted, WantSet(context_, request_, resolved));
  return MakeRegisterPlan(context_, wanted);
}

void RegisterCall::Run() {
  const absl::Status in_time = record().CheckInTime();
  if (in_time.ok() && request_.dry_run()) return AnswerDryRun();
  absl::StatusOr<WeightSetRef> set = in_time.ok() ? FindOrLoad() : absl::StatusOr<WeightSetRef>(in_time);
  if (!set.ok()) {
    context_.metrics->outcomes().CountRegistration(Registration::kRefused);
    End(set.status());
    return;
  }
  set_ = *std::move(set);
  if (Waits()) {
    subscription_ = context_.registry->Subscribe(set_, [weak = weak_from_this()] {
      if (const auto self = std::static_pointer_cast<RegisterCall>(weak.lock())) self->OnChange();
    });
  }
  std::shared_ptr<Publication> publication;
  {
    MutexLock lock(publish_mutex_);
    publication = publication_;
  }
  if (publication != nullptr) AskForMemory(publication);
  OnChange();
}

// Before files are read, what the request says by itself is checked.
absl::StatusOr<ResolvedSpec> RegisterCall::CheckAndResolve() const {
  ASSIGN_OR_RETURN(const v1::WeightSpec spec, CompleteSpec(request_.spec()));
  RETURN_IF_ERROR(CheckOffer(spec));
  RETURN_IF_ERROR(PlaceRequest(context_, request_, spec).status());
  return ResolveSpec(context_, request_.spec(), request_.environment());
}

absl::StatusOr<WeightSetRef> RegisterCall::FindOrLoad() {
  ASSIGN_OR_RETURN(const ResolvedSpec resolved, CheckAndResolve());
  ASSIGN_OR_RETURN(NewWeightSet wanted, WantSet(context_, request_, resolved));
  const Placement placement = wanted.placement;
  Registration registration = FoundAs(wanted.fingerprint.hash);
  absl::StatusOr<WeightSetRef> found;
  if (request_.has_publish()) {
    found = FindOrPublish(std::move(wanted));
  } else if (IsEngineLayout(resolved.spec)) {
    found = FindPublished(resolved, wanted.fingerprint.hash);
  } else {
    found = context_.loads->Load(std::move(wanted));
  }
  ASSIGN_OR_RETURN(WeightSetRef set, std::move(found));
  NameObject(set->fingerprint().hash);
  RETURN_IF_ERROR(context_.registry->CheckNotQuarantined(set));
  RETURN_IF_ERROR(CheckPlacement(request_, placement, set->placement()));
  if (request_.pinned()) RETURN_IF_ERROR(context_.registry->Pin(set, PinOwner::kCaller));
  if (HasGone(context_.registry->View(set).state)) return FindOrLoad();  // it was evicted between the two
  if (IsEngineLayout(resolved.spec) && !request_.has_publish()) registration = FoundAs(set->fingerprint().hash);
  context_.metrics->outcomes().CountRegistration(registration);
  record().AuditDone(set->fingerprint().hash);
  Log(LogLevel::kInfo, "register",
      {{"fingerprint", set->fingerprint().hash},
       {"model", set->spec().model()},
       {"ranks", JoinRanks(set->placement().ranks)},
       {"state", StateName(context_.registry->View(set).state)},
       {"uid", absl::StrCat(record().peer().uid)},
       {"peer_pid", absl::StrCat(record().peer().pid)}});
  return set;
}

// What this call finds, as far as can be told before it begins anything.
Registration RegisterCall::FoundAs(const std::string& fingerprint) const {
  const WeightSetRef known = context_.registry->Find(fingerprint);
  if (known == nullptr) return Registration::kStarted;
  const v1::WeightSetState state = context_.registry->View(known).state;
  if (state == v1::WEIGHT_SET_STATE_RESIDENT) return Registration::kHit;
  return state == v1::WEIGHT_SET_STATE_FAILED || HasGone(state) ? Registration::kStarted : Registration::kJoined;
}

absl::Status RegisterCall::CheckOffer(const v1::WeightSpec& spec) const {
  if (IsEngineLayout(spec)) RETURN_IF_ERROR(CheckPublishQuantization(spec, context_.publish_quantizations));
  if (!request_.has_publish() || IsEngineLayout(spec)) return absl::OkStatus();
  return MakeError(Reason::kInvalidArgument,
                   absl::StrCat("spec.layout is ", spec.layout(), ", which the service loads itself: only layout ",
                                kEngineLayout, " is published"),
                   {{"field", "spec.layout"}, {"found", spec.layout()}, {"allowed", kEngineLayout}});
}

absl::StatusOr<WeightSetRef> RegisterCall::FindOrPublish(NewWeightSet wanted) {
  PublishRequest offer{.set = std::move(wanted),
                       .rank = request_.publish().rank(),
                       .uid = record().peer().uid,
                       .pid = record().peer().pid};
  if (request_.publish().has_promise()) offer.promise = request_.publish().promise();
  ASSIGN_OR_RETURN(const PublicationManager::Begun begun, context_.publications->Begin(std::move(offer)));
  bool left = false;
  if (begun.publication != nullptr) {
    Log(LogLevel::kInfo, "publish.begun",
        {{"publication", absl::StrCat(-begun.publication->facts().id)},
         {"fingerprint", begun.set->fingerprint().hash},
         {"rank", absl::StrCat(request_.publish().rank())},
         {"device", begun.publication->facts().place.device},
         {"peer_pid", absl::StrCat(record().peer().pid)},
         {"engine", begun.set->spec().engine()},
         {"engine_version", begun.set->spec().engine_version()}});
    MutexLock lock(publish_mutex_);
    publication_ = begun.publication;
    left = left_;
  }
  if (left) context_.publications->Abandon(begun.publication);
  return begun.set;
}

// On whatever device it is: what the request says of that is checked against it later.
absl::StatusOr<WeightSetRef> RegisterCall::FindPublished(const ResolvedSpec& resolved,
                                                         const std::string& wanted) const {
  std::vector<WeightSetRef> sets = FindSets(*context_.registry, resolved).same;
  const auto has_failed = [this](const WeightSetRef& set) {
    return context_.registry->View(set).state == v1::WEIGHT_SET_STATE_FAILED;
  };
  sets.erase(std::remove_if(sets.begin(), sets.end(), has_failed), sets.end());
  const auto best = std::find_if(sets.begin(), sets.end(),
                                 [&](const WeightSetRef& set) { return set->fingerprint().hash == wanted; });
  if (best != sets.end()) return *best;
  if (!sets.empty()) return sets.front();
  return MakeError(Reason::kPublishRequired,
                   absl::StrCat("layout ", kEngineLayout, " is ", resolved.spec.engine(), " ",
                                resolved.spec.engine_version(), "'s own, and it has published no such set of ",
                                resolved.spec.model(), ": start that engine, or offer to publish it"),
                   {{"fingerprint", wanted},
                    {"engine", resolved.spec.engine()},
                    {"engine_version", resolved.spec.engine_version()}});
}

void RegisterCall::AskForMemory(const std::shared_ptr<Publication>& publication) {
  const auto& sizes = request_.publish().slab_bytes();
  publication->Allocate({sizes.begin(), sizes.end()},
                        [weak = weak_from_this(), publication](const absl::StatusOr<WritableMemory>& memory) {
                          if (!memory.ok()) return publication->End(memory.status());
                          const auto self = std::static_pointer_cast<RegisterCall>(weak.lock());
                          if (self != nullptr) self->Grant(*publication, *memory);
                        });
}

void RegisterCall::Grant(const Publication& publication, const WritableMemory& memory) {
  const PublicationFacts& facts = publication.facts();
  v1::RegisterResponse response;
  v1::PublishGrant& grant = *response.mutable_publish_grant();
  grant.set_fingerprint(facts.set->fingerprint().hash);
  grant.set_publication_token(facts.token);
  *grant.mutable_slabs() = DescribeWritable(context_, facts, memory);
  const auto left = facts.deadline - std::chrono::steady_clock::now();
  SetTimestamp(context_.clock->WallNow() + std::chrono::duration_cast<std::chrono::system_clock::duration>(left),
               grant.mutable_expire_time());
  Send(std::move(response));
}

void RegisterCall::OnLeft() {
  std::shared_ptr<Publication> publication;
  {
    MutexLock lock(publish_mutex_);
    left_ = true;
    publication = publication_;
  }
  if (publication != nullptr) context_.publications->Abandon(publication);
}

// Called for each change of the set, from whichever thread caused it.
void RegisterCall::OnChange() {
  const WeightSetView view = context_.registry->View(set_);
  if (view.state == v1::WEIGHT_SET_STATE_FAILED) {
    End(view.failure);
  } else if (view.state == v1::WEIGHT_SET_STATE_RELEASED) {
    End(MakeError(Reason::kCancelled, "the weight set was unregistered or evicted while this call waited for it",
                  {{"fingerprint", set_->fingerprint().hash}}));
  } else if (view.state == v1::WEIGHT_SET_STATE_RESIDENT || !Waits()) {
    v1::RegisterResponse response;
    *response.mutable_weight_set() = context_.registry->Describe(set_);
    SendAndEnd(std::move(response), absl::OkStatus());
  } else {
    SendLatest(ProgressResponse(*set_, view));
  }
}

}  // namespace weightbroker
