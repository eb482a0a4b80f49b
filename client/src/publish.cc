#include "client/src/publish.h"

#include <memory>
#include <utility>

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

absl::StatusOr<v1::RegisterRequest> MakeOffer(const v1::WeightSpec& spec, const v1::Environment& environment,
                                              const PublishOptions& options) {
  v1::RegisterRequest request;
  *request.mutable_spec() = spec;
  *request.mutable_environment() = environment;
  request.add_handle_kinds(v1::HANDLE_KIND_HOST_MEMFD);
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
absl::Status Fill(const Connection& connection, const v1::PublishGrant& grant, const Client::Loader& load,
                  const PublishOptions& options, Deadline deadline, PublishOutcome* outcome) {
  ASSIGN_OR_RETURN(std::shared_ptr<PublisherState> state,
                   PublisherState::Create(connection, grant, DeadlineIn(options.attach.deadline)));
  Publisher publisher(state);
  outcome->loaded = true;
  outcome->load_failure = load(publisher);
  if (!outcome->load_failure.ok()) return MakeError(Reason::kCancelled, "the engine could not load its weights");
  return state->Commit(deadline);
}

absl::Status Publish(const Connection& connection, const v1::RegisterRequest& offer, const Client::Loader& load,
                     const PublishOptions& options, Deadline deadline, PublishOutcome* outcome) {
  PublishStream stream(connection, offer, deadline);
  ASSIGN_OR_RETURN(PublishStream::Answer answer, stream.Next(options.attach.on_progress));
  if (answer.grant.has_value()) {
    RETURN_IF_ERROR(Fill(connection, *answer.grant, load, options, deadline, outcome));
    ASSIGN_OR_RETURN(answer, stream.Next(options.attach.on_progress));  // the other ranks may take longer
  }
  if (answer.weight_set.has_value()) return absl::OkStatus();
  return MakeError(Reason::kProtocolError, "the service granted a publication twice");
}

}  // namespace

PublishOutcome OfferToPublish(const Connection& connection, const v1::WeightSpec& spec,
                              const v1::Environment& environment, const Client::Loader& load,
                              const PublishOptions& options, Deadline deadline) {
  PublishOutcome outcome;
  const auto offer = MakeOffer(spec, environment, options);
  outcome.status = offer.ok() ? Publish(connection, *offer, load, options, deadline, &outcome) : offer.status();
  return outcome;
}

}  // namespace weightbroker::client
