#include "client/src/publish.h"

#include <chrono>
#include <memory>
#include <utility>

#include "client/src/attach.h"
#include "client/src/publisher_state.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/plan/plan.h"

namespace weightbroker::client {
namespace {

// The room that tensors of a promise take in one slab, in any order.
int64_t RoomFor(const v1::PublishPromise& promise) {
  return promise.size_bytes() + promise.tensor_count() * kTensorAlignmentBytes;
}

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

absl::StatusOr<v1::RegisterRequest> MakeOffer(const v1::WeightSpec& spec, const v1::Environment& environment,
                                              const EngineDevice& engine, bool one_service_per_gpu,
                                              const PublishOptions& options) {
  v1::RegisterRequest request;
  *request.mutable_spec() = spec;
  *request.mutable_environment() = environment;
  PlaceAsWanted(options.attach, engine, one_service_per_gpu, &request);
  v1::PublishOffer& offer = *request.mutable_publish();
  offer.set_rank(options.attach.rank);
  int64_t slab_bytes = options.expected_bytes;
  if (!options.promise.empty()) {
    ASSIGN_OR_RETURN(*offer.mutable_promise(), MakePromise(options.promise));
    slab_bytes = RoomFor(offer.promise());
  }
  if (slab_bytes > 0) offer.add_slab_bytes(slab_bytes);
  return request;
}

// Has `load` fill the memory, and commits it.
absl::Status Fill(const Connection& connection, const EngineDevice& engine, const v1::PublishGrant& grant,
                  const Client::Loader& load, const PublishOptions& options, Deadline deadline, PublishTimes* times,
                  PublishOutcome* outcome) {
  const auto granted = std::chrono::steady_clock::now();
  ASSIGN_OR_RETURN(std::shared_ptr<PublisherState> state,
                   PublisherState::Create(connection, engine, grant, DeadlineIn(options.attach.deadline)));
  times->grant_seconds += SecondsSince(granted);
  const auto begun = std::chrono::steady_clock::now();
  Publisher publisher(state);
  outcome->loaded = true;
  outcome->load_failure = load(publisher);
  if (!state->ended().ok()) {
    outcome->load_failure = Status();
    return state->ended();
  }
  if (!outcome->load_failure.ok()) return MakeError(Reason::kCancelled, "the engine could not load its weights");
  times->load_seconds = SecondsSince(begun);
  const auto loaded = std::chrono::steady_clock::now();
  RETURN_IF_ERROR(state->Synchronize());
  times->finish_seconds = SecondsSince(loaded);
  const auto written = std::chrono::steady_clock::now();
  ASSIGN_OR_RETURN(times->digest_seconds, state->Commit(deadline));
  times->commit_seconds = SecondsSince(written);
  times->copied_bytes = state->copied_bytes();
  return absl::OkStatus();
}

// A publication that has ended under its publisher, with its set or with another rank's publisher, is met in several
// ways; the stream of the offer says why it has.
absl::Status WhyItEnded(PublishStream& stream, const absl::Status& met) {
  if (!HasReason(met, Reason::kPublicationUnknown) && !HasReason(met, Reason::kCancelled)) return met;
  const absl::Status why = stream.Next(nullptr).status();
  return why.ok() ? met : why;
}

absl::Status Publish(const Connection& connection, const EngineDevice& engine, const v1::RegisterRequest& offer,
                     const Client::Loader& load, const PublishOptions& options, Deadline deadline,
                     PublishOutcome* outcome) {
  const auto offered = std::chrono::steady_clock::now();
  PublishStream stream(connection, offer, deadline);
  ASSIGN_OR_RETURN(PublishStream::Answer answer, stream.Next(options.attach.on_progress));
  if (answer.grant.has_value()) {
    PublishTimes times;
    times.grant_seconds = SecondsSince(offered);
    if (!engine.is_host()) {
      ASSIGN_OR_RETURN(outcome->context, CudaContext::Retain(*engine.driver, engine.device));
    }
    const absl::Status filled = Fill(connection, engine, *answer.grant, load, options, deadline, &times, outcome);
    if (!filled.ok()) return outcome->load_failure.ok() ? WhyItEnded(stream, filled) : filled;
    if (options.on_published) options.on_published(times);
    ASSIGN_OR_RETURN(answer, stream.Next(options.attach.on_progress));  // the other ranks may take longer
  }
  if (answer.weight_set.has_value()) return absl::OkStatus();
  return MakeError(Reason::kProtocolError, "the service granted a publication twice");
}

}  // namespace

PublishOutcome OfferToPublish(const Services& services, const v1::WeightSpec& spec, const v1::Environment& environment,
                              const EngineDevice& engine, const Client::Loader& load, const PublishOptions& options,
                              Deadline deadline) {
  PublishOutcome outcome;
  const auto connection = services.For(engine.name());
  const auto offer = MakeOffer(spec, environment, engine, services.per_gpu(), options);
  outcome.status.Update(connection.status());
  outcome.status.Update(offer.status());
  if (!outcome.status.ok()) return outcome;
  outcome.status = Publish(**connection, engine, *offer, load, options, deadline, &outcome);
  return outcome;
}

absl::StatusOr<std::unique_ptr<WeightsState>> AttachOrPublish(const Services& services, const v1::WeightSpec& spec,
                                                              const v1::Environment& environment,
                                                              const EngineDevice& engine, const Client::Loader& load,
                                                              const PublishOptions& options, Status* load_failure) {
  // A broker that ends takes a publication with it, and so does the publisher of another rank: once more is worth the
  // engine's trouble, for ever is not.
  constexpr int kMaxLoads = 3;
  const Deadline deadline = DeadlineIn(options.attach.load_deadline);
  AttachOptions attach = options.attach;
  attach.register_if_missing = false;
  int loads = 0;
  PublishOutcome outcome;
  while (true) {
    auto attached = AttachToService(services, spec, environment, engine, attach);
    if (attached.ok() || !IsMissing(attached.status())) return attached;
    outcome = OfferToPublish(services, spec, environment, engine, load, options, deadline);
    *load_failure = outcome.load_failure;
    if (!outcome.load_failure.ok()) return outcome.status;
    loads += outcome.loaded ? 1 : 0;
    const bool worth_it = !outcome.loaded || loads < kMaxLoads;
    const bool was_cut_off =
        HasReason(outcome.status, Reason::kPublisherGone) || HasReason(outcome.status, Reason::kServiceUnavailable);
    if (!outcome.status.ok() && !(was_cut_off && worth_it)) return outcome.status;
  }
}

}  // namespace weightbroker::client
