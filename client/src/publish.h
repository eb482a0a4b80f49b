// Publishing an engine's tensors, or waiting for another engine that does.
#pragma once

#include "absl/status/status.h"
#include "client/src/connection.h"
#include "weightbroker/client.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker::client {

// What came of an offer.
struct PublishOutcome {
  absl::Status status;  // ok: the set is resident
  Status load_failure;  // not ok: what `load` failed with, and `status` is CANCELLED
  bool loaded = false;  // whether `load` was called
};

// Offers to publish rank `options.attach.rank` of `spec`. If the service grants it, calls `load`, commits, and waits
// for the other ranks; otherwise waits for whoever publishes it. PUBLISHER_GONE if that one ends before it is done:
// offer again. Thread-safe.
PublishOutcome OfferToPublish(const Connection& connection, const v1::WeightSpec& spec,
                              const v1::Environment& environment, const Client::Loader& load,
                              const PublishOptions& options, Deadline deadline);

}  // namespace weightbroker::client
