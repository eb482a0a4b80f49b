#include "server/broker/broker.h"

#include <google/protobuf/util/time_util.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/mutex.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"
#include "common/desired/desired_check.h"
#include "common/identity/fingerprint.h"
#include "common/memory/host_slab.h"
#include "server/broker/admin_service.h"
#include "server/broker/engine_groups.h"
#include "server/broker/group_service.h"
#include "server/broker/health_service.h"
#include "server/broker/machine_facts.h"
#include "server/broker/object_views.h"
#include "server/broker/quarantine.h"
#include "server/broker/reconciler.h"
#include "server/broker/service_context.h"
#include "server/broker/wanted_set.h"
#include "server/broker/weight_broker_service.h"
#include "server/endpoint/endpoint.h"

namespace weightbroker {
namespace {

// Health asks which pages a slab would get; every slab worth the name is at least this long.
constexpr int64_t kProbeSlabBytes = int64_t{1} << 30;
// More of them at once would only wait for each other in the driver.
constexpr int kDeviceWorkers = 2;
constexpr size_t kMaxWaitingForDevices = 256;
// For what has been said last to be written. gRPC waits for connections whose clients do not look at them, too, and for
// those there is nothing to wait for.
constexpr std::chrono::milliseconds kLastWords(50);
// Its thread never blocks; a machine that has not let it run for so long is at its end in other ways.
constexpr std::chrono::milliseconds kEndpointPatience(2000);
// Of a scrape with a driver that does not answer; Prometheus gives it 10 s by default.
constexpr std::chrono::milliseconds kScrapePatience(1000);

// As a label.
std::string DesiredStateName(v1::DesiredSet::State state) {
  return absl::AsciiStrToLower(WithoutPrefix(v1::DesiredSet::State_Name(state), "STATE_"));
}

LoadResult ResultOf(const absl::Status& status) {
  if (status.ok()) return LoadResult::kResident;
  if (HasReason(status, Reason::kLoaderStalled)) return LoadResult::kStalled;
  const bool cancelled = HasReason(status, Reason::kCancelled) || HasReason(status, Reason::kDraining);
  return cancelled ? LoadResult::kCancelled : LoadResult::kFailed;
}

}  // namespace

// In the order in which they need each other: what stands below is gone before what stands above.
struct Broker::Parts {
  Parts(BrokerOptions broker_options, ModelResolver model_resolver)
      : options(std::move(broker_options)),
        resolver(std::move(model_resolver)),
        rooted_files(*options.file_system, resolver),
        identities(rooted_files, *options.file_system),
        registry(Registry::Create(
            {.memory_limit_bytes = options.memory_limit_bytes,
             .host_memory = options.host_memory,
             .device_memory = [this](const std::string& device) { return options.devices->Memory(device); },
             .clock = options.clock,
             .vault = options.vault,
             .device_memory_limit = options.device_memory_limit,
             .evicts_idle = options.evicts_idle,
             .on_evicted = [this](const v1::WeightSet& set) { OnEvicted(set); }})),
        groups({.vault = options.vault,
                .clock = options.clock,
                .is_resident = [this](const std::string& fingerprint) { return IsResident(fingerprint); }}),
        metrics(options.version, [this] { return ReadGauges(); }),
        health_facts(*options.clock, [this] { return ReadFacts(); }),
        exporters([this](const std::string& fingerprint) { OnExporterEnded(fingerprint); }),
        loads({.registry = registry,
               .spawner = options.spawner,
               .reading = options.reading,
               .architectures = options.architectures,
               .max_concurrent_loads = options.max_concurrent_loads,
               .stall_timeout = options.loader_stall_timeout,
               .vault = options.vault,
               .check_gpu_fd = options.check_gpu_fd,
               .on_degraded = [this](std::string_view how) { metrics.CountDegradedLoad(how); },
               .on_report = [this](const internal::v1::LoadReport& report) { OnReport(report); },
               .on_finished = [this](const WeightSetRef& set, const absl::Status& result) { OnLoaded(set, result); }}),
        publications(
            {.registry = registry,
             .spawner = options.spawner,
             .timeout = options.publish_timeout,
             .check_gpu_fd = options.check_gpu_fd,
             .on_finished = [this](const WeightSetRef& set, const absl::Status& result) { OnPublished(set, result); },
             .on_ended = [this](const PublicationFacts& facts) { tickets.Revoke(facts.id); }}),
        scrubs({.registry = registry,
                .spawner = options.spawner,
                .interval = options.scrub_interval,
                .bytes_per_second = options.scrub_bytes_per_second,
                .stall_timeout = options.loader_stall_timeout,
                .on_shard = [this](const v1::ScrubbedShard& shard) { OnScrubbed(shard); }}),
        limits(options.caps.calls_per_uid),
        gpu_faults(options.open_gpu_events, [this](const GpuEvent& event) { OnGpuFault(event); }),
        stream_watch(options.caps.write_timeout, [this] { OnStreamCut(); }),
        workers(options.worker_threads, options.max_waiting_calls),
        device_workers(kDeviceWorkers, kMaxWaitingForDevices),
        health_worker(1, kMaxWaitingForDevices),
        machine(&health_facts, &health_worker),
        context(MakeContext()),
        reconciler(
            {.registry = registry,
             .file = options.desired_file,
             .files = options.file_system,
             .clock = options.clock,
             .check = [this](const auto& state) { return CheckDesiredModels(state); },
             .find_fingerprint = [this](const auto& request) { return FindDesiredFingerprint(context, request); },
             .load = [this](const auto& request) { return LoadDesired(context, request); },
             .may_prove_to_be = [this](const auto& request,
                                       const auto& set) { return MayProveToBe(context, request, set); },
             .on_failure = [this](const std::string& reason) { metrics.CountDesiredFailure(reason); },
             .on_read = [this](bool taken) { metrics.CountDesiredRead(taken); },
             .on_alias_change = [this](const std::string& what) { metrics.CountAliasChange(what); }}),
        service(context),
        admin(context),
        group_service(context, groups),
        health(context) {}
  // A scrape asks parts that are gone before the metrics are.
  ~Parts() { metrics.StopServing(); }

  ServiceContext MakeContext() {
    return {.registry = registry,
            .loads = &loads,
            .publications = &publications,
            .resolver = &resolver,
            .identities = &identities,
            .file_system = options.file_system,
            .tickets = &tickets,
            .metrics = &metrics,
            .workers = &workers,
            .device_workers = &device_workers,
            .health_worker = &health_worker,
            .health_facts = &health_facts,
            .live_calls = &live_calls,
            .clock = options.clock,
            .devices = options.devices,
            .version = options.version,
            .publish_quantizations = options.publish_quantizations,
            .architectures_sha256 = HashArchitectures(options.architectures),
            .memory_limit_bytes = options.memory_limit_bytes,
            .outlives_broker = options.vault->outlives_broker(),
            .exports_unverified = options.exports_unverified,
            .start_time = options.clock->WallNow(),
            .ticket_lifetime = options.ticket_lifetime,
            .scrubs = &scrubs,
            .reconciler = options.desired_file.empty() ? nullptr : &reconciler,
            .limits = &limits,
            .stream_watch = &stream_watch,
            .access = options.access,
            .call_deadline = options.caps.call_deadline,
            .find_peer = [this](const std::string& grpc_peer) { return peers.Find(grpc_peer); }};
  }

  absl::Status CheckDesiredModels(const DesiredState& state) const {
    std::vector<std::string> roots;
    for (const ModelRoot& root : resolver.roots()) roots.push_back(root.name);
    return CheckModelRoots(state, roots, options.desired_file);
  }

  HealthFacts::Facts ReadFacts() {
    return {.available_bytes = options.host_memory().available_bytes,
            .open_connections = peers.CountOpen(),
            .host_page_kind = ProbeHostPageKind(kProbeSlabBytes),
            .gpus = options.devices->Report()};
  }

  void OnScrubbed(const v1::ScrubbedShard& shard) {
    const bool checked = shard.result() != v1::ScrubbedShard::RESULT_NOT_CHECKED;
    const ScrubOutcome outcome = !checked                   ? ScrubOutcome::kNotChecked
                                 : shard.damaged_size() > 0 ? ScrubOutcome::kDamaged
                                                            : ScrubOutcome::kIntact;
    metrics.CountScrub(outcome, shard.checked_bytes(), shard.damaged_size());
  }

  // An event that names no GPU may be any one's.
  void OnGpuFault(const GpuEvent& event) {
    const std::string kind = GpuEventKindName(event.kind);
    metrics.CountDeviceFault(event.uuid.empty() ? "unknown" : event.uuid, kind);
    const std::string what = absl::StrCat(
        "has reported ",
        event.kind == GpuEvent::Kind::kXid ? absl::StrCat("XID ", event.xid) : "an uncorrectable ECC error",
        ": what lies in its memory cannot be relied on");
    const std::string why = absl::StrCat("its GPU ", what);
    options.devices->MarkFaulty(event.uuid, absl::StrCat("it ", what));
    for (const Registry::PlacedShard& shard : registry->HealthyShards(nullptr, event.uuid)) {
      if (shard.shard->device != kHostDevice) QuarantineShard(*registry, shard.set, shard.shard->rank, why);
    }
  }

  void OnStreamCut() {
    metrics.CountLimitHit("write_timeout");
    Log(LogLevel::kWarning, "call.cut", {{"message", "a caller did not read what was sent to it (--write_timeout)"}});
  }

  void OnConnectionRefused(const std::string& reason) {
    metrics.CountConnectionRefused(reason);
    if (reason == refusal::kTooManyConnections) metrics.CountLimitHit("max_connections_per_uid");
  }

  void OnExporterEnded(const std::string& fingerprint) {
    metrics.CountExporterEnded();
    Log(LogLevel::kError, "exporter.ended",
        {{"fingerprint", fingerprint},
         {"reason", std::string(ReasonName(Reason::kExporterDead))},
         {"message",
          "the process that exported this weight set by CUDA IPC has ended: engines keep what they have "
          "mapped, and no other can map it"}});
  }

  void OnEvicted(const v1::WeightSet& set) {
    int64_t bytes = 0;
    for (const v1::Shard& shard : set.shards()) bytes += shard.size_bytes();
    metrics.CountEviction(bytes);
    LogFields fields = DescribeForLog(set);
    fields.emplace_back("model", set.spec().model());
    fields.emplace_back("last_use", google::protobuf::util::TimeUtil::ToString(set.last_use_time()));
    Log(LogLevel::kInfo, "set.evicted", fields);
  }

  GaugeValues ReadGauges() {
    const RegistryTotals totals = registry->Totals();
    GaugeValues values;
    for (int number = v1::WEIGHT_SET_STATE_ALLOCATING; number <= v1::WEIGHT_SET_STATE_FAILED; ++number) {
      const auto state = static_cast<v1::WeightSetState>(number);
      if (state == v1::WEIGHT_SET_STATE_RELEASED) continue;  // such a set is forgotten
      const auto found = totals.sets_by_state.find(state);
      values.weight_sets_by_state[StateName(state)] = found == totals.sets_by_state.end() ? 0 : found->second;
    }
    values.resident_shards = totals.resident_shards;
    values.resident_bytes = totals.resident_bytes;
    values.resident_tensors = totals.resident_tensors;
    values.quarantined_shards = totals.quarantined_shards;
    values.device_events_unwatched = gpu_faults.unwatched();
    values.publisher_writable_shards = totals.publisher_writable_shards;
    values.pinned_weight_sets = totals.pinned_sets;
    values.aliases = totals.alias_count;
    values.reserved_bytes = totals.reserved_bytes;
    for (const ServedDevice& device : options.devices->Served()) values.reserved_bytes_by_device[device.name] = 0;
    for (const auto& [device, bytes] : totals.reserved_by_device) values.reserved_bytes_by_device[device] = bytes;
    values.leases = totals.lease_count;
    values.open_connections = peers.CountOpen();
    GroupTotals group_totals = groups.Totals();
    values.groups = group_totals.groups;
    values.group_members_by_role = std::move(group_totals.members_by_role);
    values.group_takeovers_by_cause = std::move(group_totals.takeovers_by_cause);
    ReadDesired(&values);
    values.objects = ReadObjects(totals);
    return values;
  }

  void ReadDesired(GaugeValues* values) const {
    for (int number = v1::DesiredSet::STATE_WAITING; number <= v1::DesiredSet::STATE_DRAINING; ++number) {
      values->desired_sets_by_state[DesiredStateName(static_cast<v1::DesiredSet::State>(number))] = 0;
    }
    for (const v1::DesiredSet& set : reconciler.DescribeSets()) {
      ++values->desired_sets_by_state[DesiredStateName(set.state())];
    }
    values->desired_aliases_by_state = {{"in_place", 0}, {"missing", 0}, {"failed", 0}};
    for (const v1::DesiredAlias& alias : reconciler.DescribeAliases()) {
      ++values->desired_aliases_by_state[alias.in_place() ? "in_place" : alias.has_failure() ? "failed" : "missing"];
    }
    values->desired_file_refused = !reconciler.failure().ok();
  }

  bool IsResident(const std::string& fingerprint) {
    const WeightSetRef set = registry->Find(fingerprint);
    return set != nullptr && registry->View(set).state == v1::WEIGHT_SET_STATE_RESIDENT;
  }

  ObjectGauges ReadObjects(const RegistryTotals& totals) {
    ObjectGauges objects = DescribeObjects(registry->List());
    objects.ready = ServiceStatus(totals, &reconciler) == v1::HealthResponse::STATUS_READY;
    objects.memory_limit_bytes = options.memory_limit_bytes;
    for (const ServedDevice& device : options.devices->Served()) objects.devices.try_emplace(device.name);
    if (const auto facts = machine.Get(kScrapePatience); facts.has_value()) AddMachineFacts(*facts, &objects);
    return objects;
  }

  void OnReport(const internal::v1::LoadReport& report) {
    const auto seconds = [](int64_t from_ns, int64_t to_ns) { return static_cast<double>(to_ns - from_ns) / 1e9; };
    metrics.outcomes().ObserveLoadPhases({.plan_seconds = seconds(report.started_ns(), report.planned_ns()),
                                          .allocate_seconds = seconds(report.planned_ns(), report.allocated_ns()),
                                          .read_seconds = seconds(report.allocated_ns(), report.loaded_ns()),
                                          .digest_seconds = seconds(report.loaded_ns(), report.digested_ns())});
  }

  void OnLoaded(const WeightSetRef& set, const absl::Status& result) {
    const v1::WeightSet described = registry->Describe(set);
    metrics.CountLoad(ResultOf(result), described.load_seconds());
    if (result.ok()) {
      metrics.outcomes().ObserveLoad(described.read_bytes());
      WatchExporter(set);
    } else {
      metrics.outcomes().CountLoadFailure(GetErrorDetails(result).reason);
    }
  }

  void WatchExporter(const WeightSetRef& set);
  void OnPublished(const WeightSetRef& set, const absl::Status& result) {
    metrics.CountPublication(result.ok());
    if (!result.ok()) {
      metrics.outcomes().CountLoadFailure(GetErrorDetails(result).reason);
      return;
    }
    metrics.CountLoad(LoadResult::kResident, registry->Describe(set).load_seconds());
    WatchExporter(set);
  }

  void AdoptWhatWasKept();
  absl::Status AdoptSet(Adoption::Set kept);
  void AdoptAliases(const std::vector<KeptAlias>& aliases);
  absl::StatusOr<WeightSetRef> ResumeLoad(Adoption::Load load);
  absl::Status Serve(int listen_fd);
  bool IsAlive();
  void Shutdown();

  const BrokerOptions options;
  const ModelResolver resolver;
  RootedFileSystem rooted_files;
  IdentityCache identities;
  const std::shared_ptr<Registry> registry;
  TicketBox tickets;
  PeerTable peers;
  EngineGroups groups;
  Metrics metrics;
  HealthFacts health_facts;
  LiveCalls live_calls;
  ExporterWatch exporters;
  LoadManager loads;
  PublicationManager publications;
  ScrubManager scrubs;
  ClientLimits limits;
  GpuFaultWatch gpu_faults;
  StreamWatch stream_watch;
  WorkerPool workers;
  WorkerPool device_workers;
  WorkerPool health_worker;
  MachineFacts machine;
  const ServiceContext context;
  Reconciler reconciler;
  WeightBrokerServiceImpl service;
  AdminServiceImpl admin;
  GroupServiceImpl group_service;
  HealthServiceImpl health;
  int metrics_port = 0;
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<Endpoint> endpoint;

  Mutex alive_mutex;  // held while the endpoint is asked
  bool shut_down ABSL_GUARDED_BY(alive_mutex) = false;
};

// Before anybody can call: no call sees a set missing that is there.
void Broker::Parts::AdoptWhatWasKept() {
  Adoption kept = options.vault->TakeAdoption();
  metrics.CountAdoptions(AdoptionResult::kDropped, kept.dropped_entries);
  registry->AdoptGenerations(kept.generations);
  const int kept_groups = static_cast<int>(kept.groups.size());
  const int adopted_groups = groups.Adopt(std::move(kept.groups));
  metrics.CountAdoptions(AdoptionResult::kAdopted, adopted_groups);
  metrics.CountAdoptions(AdoptionResult::kDropped, kept_groups - adopted_groups);
  for (Adoption::Set& set : kept.sets) {
    const std::string fingerprint = set.request.fingerprint.hash;
    std::vector<int32_t> ranks;
    for (const auto& shard : set.shards) ranks.push_back(shard->rank);
    options.vault->TakingUp(fingerprint);
    const absl::Status adopted = AdoptSet(std::move(set));
    metrics.CountAdoptions(adopted.ok() ? AdoptionResult::kAdopted : AdoptionResult::kDropped, 1);
    if (adopted.ok()) continue;
    Log(LogLevel::kError, "adoption.refused",
        {{"fingerprint", fingerprint},
         {"reason", GetErrorDetails(adopted).reason},
         {"message", std::string(adopted.message())}});
    for (const int32_t rank : ranks) options.vault->Forget(fingerprint, rank).IgnoreError();
  }
  AdoptAliases(kept.aliases);
  for (Adoption::Load& load : kept.loads) {
    const std::string fingerprint = load.request.fingerprint.hash;
    options.vault->TakingUp(fingerprint);
    const absl::StatusOr<WeightSetRef> resumed = ResumeLoad(std::move(load));
    metrics.CountAdoptions(resumed.ok() ? AdoptionResult::kRestarted : AdoptionResult::kDropped, 1);
    if (resumed.ok()) continue;
    Log(LogLevel::kError, "load.not_resumed",
        {{"fingerprint", fingerprint},
         {"reason", GetErrorDetails(resumed.status()).reason},
         {"message", std::string(resumed.status().message())}});
    options.vault->ForgetLoad(fingerprint).IgnoreError();
  }
  options.vault->TakingUp("");
}

void Broker::Parts::AdoptAliases(const std::vector<KeptAlias>& aliases) {
  for (const KeptAlias& alias : aliases) {
    const absl::Status adopted = registry->AdoptAlias(alias);
    if (adopted.ok()) continue;
    metrics.CountAdoptions(AdoptionResult::kDropped, 1);
    Log(LogLevel::kError, "adoption.refused",
        {{"alias", alias.name},
         {"fingerprint", alias.fingerprint},
         {"reason", GetErrorDetails(adopted).reason},
         {"message", std::string(adopted.message())}});
    options.vault->ForgetAlias(alias.name).IgnoreError();
  }
}

absl::StatusOr<WeightSetRef> Broker::Parts::ResumeLoad(Adoption::Load load) {
  const std::string model = load.request.spec.model();
  RETURN_IF_ERROR(resolver.CheckInside(model, model));  // the roots may be others than they were
  return loads.Resume(std::move(load));
}

absl::Status Broker::Parts::AdoptSet(Adoption::Set kept) {
  const std::string& model = kept.request.spec.model();
  RETURN_IF_ERROR(resolver.CheckInside(model, model));  // the roots may be others than they were
  ASSIGN_OR_RETURN(const WeightSetRef set, registry->Adopt(std::move(kept)));
  // With it the next call by spec opens no file. It must stand for the same files as the fingerprint does.
  const Fingerprint again = ComputeFingerprint(set->spec(), set->environment(), set->identity(),
                                               DeviceFactsOf(set->fingerprint()), context.architectures_sha256);
  if (again.hash == set->fingerprint().hash) identities.Seed(set->shared_identity());
  WatchExporter(set);
  Log(LogLevel::kInfo, "weights.adopted", DescribeForLog(registry->Describe(set)));
  return absl::OkStatus();
}

void Broker::Parts::WatchExporter(const WeightSetRef& set) {
  for (const RankPlacement& rank : set->placement().ranks) {
    const auto shard = registry->Look(set, rank.rank, {});
    if (shard.ok() && (*shard)->exporter != nullptr) exporters.Add((*shard)->exporter, set->fingerprint().hash);
  }
}

absl::Status Broker::Parts::Serve(int listen_fd) {
  if (options.metrics_port.has_value()) {
    ASSIGN_OR_RETURN(metrics_port, metrics.Serve(*options.metrics_port));
  }
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;  // without a port: the endpoint hands it every connection
  builder.RegisterService(&service);
  builder.RegisterService(&admin);
  builder.RegisterService(&group_service);
  builder.RegisterService(&health);
  builder.SetMaxReceiveMessageSize(options.caps.request_bytes);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.caps.streams_per_connection);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, options.caps.metadata_bytes);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, static_cast<int>(options.idle_timeout.count()));
  server = builder.BuildAndStart();
  if (server == nullptr) return MakeError(Reason::kSystemError, "the gRPC server could not be started");
  endpoint = std::make_unique<Endpoint>(
      EndpointOptions{.listen_fd = listen_fd,
                      .server = server.get(),
                      .tickets = &tickets,
                      .peers = &peers,
                      .access = options.access,
                      .handshake_timeout = options.handshake_timeout,
                      // The endpoint logs it, at a bounded rate.
                      .on_refused = [this](const std::string& reason, const Peer&) { OnConnectionRefused(reason); },
                      .max_connections_per_uid = options.caps.connections_per_uid});
  return absl::OkStatus();
}

bool Broker::Parts::IsAlive() {
  (void)registry->Totals();
  MutexLock lock(alive_mutex);
  return shut_down || endpoint->Responds(kEndpointPatience);
}

void Broker::Parts::Shutdown() {
  {
    MutexLock lock(alive_mutex);
    shut_down = true;
  }
  if (endpoint != nullptr) endpoint->Stop();
  reconciler.Stop();                                   // before the sets that it would load again go
  registry->BeginDrain();                              // exports get their event and end; watchers see it
  loads.Shutdown();                                    // loads end, and with them the calls that wait for them
  publications.Shutdown();                             // likewise
  scrubs.Shutdown();                                   // likewise
  live_calls.WaitUntilNone(options.shutdown_timeout);  // whoever does not read what is sent is cut off
  if (server != nullptr) server->Shutdown(std::chrono::system_clock::now() + kLastWords);
  workers.Stop();
  device_workers.Stop();
  health_worker.Stop();
}

absl::StatusOr<std::unique_ptr<Broker>> Broker::Start(BrokerOptions options, int listen_fd) {
  ASSIGN_OR_RETURN(ModelResolver resolver, ModelResolver::Create(*options.file_system, options.model_roots));
  auto parts = std::make_unique<Parts>(std::move(options), std::move(resolver));
  parts->AdoptWhatWasKept();
  const absl::Status desired = parts->reconciler.ReadFile();
  if (parts->registry->Sets().empty()) RETURN_IF_ERROR(desired);
  RETURN_IF_ERROR(parts->Serve(listen_fd));
  parts->reconciler.Start();
  return std::unique_ptr<Broker>(new Broker(std::move(parts)));
}

Broker::Broker(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

Broker::~Broker() { Shutdown(); }

void Broker::Shutdown() { parts_->Shutdown(); }

void Broker::ReloadDesired() {
  if (parts_->options.desired_file.empty()) {
    Log(LogLevel::kInfo, "desired.none", {{"message", "there is nothing to read again: no --desired was given"}});
    return;
  }
  parts_->reconciler.ReadFile().IgnoreError();  // it has said so
}

bool Broker::IsAlive() { return parts_->IsAlive(); }

int Broker::metrics_port() const { return parts_->metrics_port; }

}  // namespace weightbroker
