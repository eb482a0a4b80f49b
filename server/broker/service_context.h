// What every call of the broker shares. Plain pointers: the Broker owns all of it and outlives the calls.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "server/broker/client_limits.h"
#include "server/broker/clock.h"
#include "server/broker/device_catalog.h"
#include "server/broker/health_facts.h"
#include "server/broker/identity_cache.h"
#include "server/broker/live_calls.h"
#include "server/broker/load_manager.h"
#include "server/broker/metrics.h"
#include "server/broker/model_resolver.h"
#include "server/broker/publication_manager.h"
#include "server/broker/publish_gate.h"
#include "server/broker/reconciler.h"
#include "server/broker/registry.h"
#include "server/broker/scrub_manager.h"
#include "server/broker/stream_watch.h"
#include "server/broker/worker_pool.h"
#include "server/endpoint/access.h"
#include "server/endpoint/peer.h"
#include "server/endpoint/ticket_box.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker {

struct ServiceContext {
  std::shared_ptr<Registry> registry;
  LoadManager* loads = nullptr;
  PublicationManager* publications = nullptr;
  const ModelResolver* resolver = nullptr;
  IdentityCache* identities = nullptr;
  FileSystem* file_system = nullptr;
  TicketBox* tickets = nullptr;
  Metrics* metrics = nullptr;
  WorkerPool* workers = nullptr;
  WorkerPool* device_workers = nullptr;  // for questions to the GPUs' driver: one that hangs holds up those alone
  WorkerPool* health_worker = nullptr;   // for those of Health, of which all wait for the same answers
  HealthFacts* health_facts = nullptr;
  LiveCalls* live_calls = nullptr;
  const Clock* clock = nullptr;
  DeviceCatalog* devices = nullptr;
  std::string version;
  PublishQuantizations publish_quantizations;
  std::string architectures_sha256;  // part of every fingerprint; empty for none but those that are built in
  int64_t memory_limit_bytes = 0;
  bool outlives_broker = false;     // what is resident
  bool exports_unverified = false;  // what is resident, when its files are gone
  std::chrono::system_clock::time_point start_time;
  std::chrono::milliseconds ticket_lifetime{60'000};
  ScrubManager* scrubs = nullptr;
  const Reconciler* reconciler = nullptr;  // null: nothing is desired
  ClientLimits* limits = nullptr;          // null: none
  StreamWatch* stream_watch = nullptr;     // null: none
  AccessPolicy access = {};
  std::chrono::milliseconds call_deadline{0};  // for a call to get its turn; 0: none
  // The caller behind ServerContext::peer(); nullopt for a connection that the endpoint did not accept.
  std::function<std::optional<Peer>(const std::string& grpc_peer)> find_peer;
};

// One state for everyone who asks: Health, the standard health service, and readiness. `reconciler` may be null.
v1::HealthResponse::Status ServiceStatus(const RegistryTotals& totals, const Reconciler* reconciler);

// TOO_MANY_REQUESTS, for a call that finds every worker busy and the queue full.
absl::Status WorkersBusyError();

}  // namespace weightbroker
