// Publishing an engine's tensors, or waiting for another engine that does.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/connection.h"
#include "client/src/engine_device.h"
#include "client/src/services.h"
#include "client/src/weights_state.h"
#include "common/device/cuda_context.h"
#include "weightbroker/client.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker::client {

// What came of an offer.
struct PublishOutcome {
  absl::Status status;  // ok: the set is resident
  Status load_failure;  // not ok: what `load` failed with, and `status` is CANCELLED
  bool loaded = false;  // whether `load` was called
  CudaContext context;  // of an engine on a GPU: kept, so that attaching need not make another
};

// Offers to publish rank `options.attach.rank` of `spec`. If the service grants it, calls `load`, commits, and waits
// for the other ranks; otherwise waits for whoever publishes it. PUBLISHER_GONE if that one ends before it is done:
// offer again. Thread-safe.
PublishOutcome OfferToPublish(const Services& services, const v1::WeightSpec& spec, const v1::Environment& environment,
                              const EngineDevice& engine, const Client::Loader& load, const PublishOptions& options,
                              Deadline deadline);

// Attaches to what is there, or publishes it, again and again until one of the two has come about or is not worth more
// trouble: see Client::AttachOrPublish. A failure of `load` itself comes back in `load_failure`.
absl::StatusOr<std::unique_ptr<WeightsState>> AttachOrPublish(const Services& services, const v1::WeightSpec& spec,
                                                              const v1::Environment& environment,
                                                              const EngineDevice& engine, const Client::Loader& load,
                                                              const PublishOptions& options, Status* load_failure);

}  // namespace weightbroker::client
