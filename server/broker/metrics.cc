#include "server/broker/metrics.h"

#include <netinet/in.h>
#include <prometheus/collectable.h>
#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/family.h>
#include <prometheus/histogram.h>
#include <prometheus/metric_family.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/strings.h"
#include "common/base/thread.h"
#include "common/base/unique_fd.h"
#include "server/broker/process_metrics.h"
#include "server/broker/reason_labels.h"
#include "server/endpoint/acceptor.h"

namespace weightbroker {
namespace {

constexpr std::string_view kRpcMethodNames[kRpcMethodCount] = {
    "Register",       "Fingerprint", "Export",      "AllocateSlabs", "Commit",   "Health",
    "ListWeightSets", "Unregister",  "HealthCheck", "HealthWatch",   "Scrub",    "ReportDamage",
    "ReportAttach",   "JoinGroup",   "ListGroups",  "RemoveGroup",   "SetAlias", "DeleteAlias"};
constexpr const char* kLoadResults[] = {"resident", "failed", "stalled", "cancelled"};
constexpr const char* kAdoptionResults[] = {"adopted", "restarted", "dropped"};
constexpr const char* kExportResults[] = {"granted", "renewed", "looked", "refused"};
constexpr const char* kScrubOutcomes[] = {"intact", "damaged", "not_checked"};
constexpr const char* kLimits[] = {"max_connections_per_uid", "max_calls_per_uid", "call_deadline", "write_timeout"};
constexpr std::string_view kConnectionReasons[] = {
    refusal::kAccessDenied,  refusal::kHandshakeTimeout, refusal::kHandshakeGarbage,  refusal::kTooManyHandshakes,
    refusal::kTicketInvalid, refusal::kReplyTimeout,     refusal::kTooManyConnections};
constexpr std::string_view kFilePrefix = "checkpoint.files.";
// Those that most mismatches are in; names of other side files are added as they come.
constexpr const char* kMismatchFields[] = {"spec.tensor_parallel_size",
                                           "spec.pipeline_parallel_size",
                                           "spec.expert_parallel_size",
                                           "spec.data_parallel_size",
                                           "spec.quantization",
                                           "spec.dtype",
                                           "spec.layout",
                                           "spec.engine",
                                           "spec.engine_version",
                                           "spec.mtp_layers",
                                           "spec.unquantized_modules",
                                           "environment.torch_version",
                                           "device.kind",
                                           "device.compute_capability",
                                           "device.driver_version",
                                           "checkpoint.config.json.sha256",
                                           "checkpoint.files.header_sha256",
                                           "checkpoint.files.contents_sha256",
                                           "checkpoint.files.size_bytes",
                                           "checkpoint.files.device",
                                           "checkpoint.files.inode",
                                           "checkpoint.files.mtime_ns",
                                           "checkpoint.files.ctime_ns",
                                           "other"};

// From a call that touches nothing to one that reads the headers of a large model.
const prometheus::Histogram::BucketBoundaries kRpcBuckets = {0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025,
                                                             0.05,   0.1,     0.25,   1,     5,      30,    120,  600};
const prometheus::Histogram::BucketBoundaries kLoadBuckets = {0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800};

template <typename Range>
bool Contains(const Range& range, std::string_view value) {
  return std::find(std::begin(range), std::end(range), value) != std::end(range);
}

// And leaves again. Best effort.
void ConnectTo(int port) {
  const UniqueFd connection(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  [[maybe_unused]] const int result =
      connect(connection.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
}

const MetricInfo& Info(MetricId id) { return MetricTable()[static_cast<size_t>(id)]; }

// The gauges, which nobody keeps up to date: they are read when they are scraped.
class GaugeCollector : public prometheus::Collectable {
 public:
  GaugeCollector(std::string version, std::function<GaugeValues()> read)
      : version_(std::move(version)), read_(std::move(read)) {}

  std::vector<prometheus::MetricFamily> Collect() const override {
    const GaugeValues values = read_();
    std::vector<prometheus::MetricFamily> families;
    families.push_back(Family(MetricId::kBuildInfo));
    AddValue(1, {{"version", version_}}, &families.back());
    families.push_back(Family(MetricId::kWeightSets));
    for (const auto& [state, count] : values.weight_sets_by_state)
      AddValue(count, {{"state", state}}, &families.back());
    families.push_back(Family(MetricId::kDesiredSets));
    for (const auto& [state, count] : values.desired_sets_by_state) {
      AddValue(count, {{"state", state}}, &families.back());
    }
    families.push_back(Family(MetricId::kDesiredAliases));
    for (const auto& [state, count] : values.desired_aliases_by_state) {
      AddValue(count, {{"state", state}}, &families.back());
    }
    families.push_back(Family(MetricId::kLogLinesDroppedTotal));
    families.back().metric.emplace_back().counter.value = static_cast<double>(DroppedLogLines());
    const std::pair<MetricId, double> plain[] = {
        {MetricId::kResidentShards, static_cast<double>(values.resident_shards)},
        {MetricId::kResidentBytes, static_cast<double>(values.resident_bytes)},
        {MetricId::kResidentTensors, static_cast<double>(values.resident_tensors)},
        {MetricId::kPublisherWritableShards, static_cast<double>(values.publisher_writable_shards)},
        {MetricId::kPinnedWeightSets, values.pinned_weight_sets},
        {MetricId::kAliases, values.aliases},
        {MetricId::kDesiredFileRefused, values.desired_file_refused ? 1 : 0},
        {MetricId::kQuarantinedShards, static_cast<double>(values.quarantined_shards)},
        {MetricId::kDeviceEventsUnwatched, values.device_events_unwatched ? 1 : 0},
        {MetricId::kReservedBytes, static_cast<double>(values.reserved_bytes)},
        {MetricId::kLeases, values.leases},
        {MetricId::kOpenConnections, values.open_connections},
        {MetricId::kGroups, values.groups},
    };
    for (const auto& [id, value] : plain) {
      families.push_back(Family(id));
      AddValue(value, {}, &families.back());
    }
    families.push_back(Family(MetricId::kDeviceReservedBytes));
    for (const auto& [device, bytes] : values.reserved_bytes_by_device) {
      AddValue(static_cast<double>(bytes), {{"device", device}}, &families.back());
    }
    families.push_back(Family(MetricId::kGroupMembers));
    for (const auto& [role, count] : values.group_members_by_role) AddValue(count, {{"role", role}}, &families.back());
    families.push_back(Family(MetricId::kGroupTakeoversTotal));
    for (const auto& [cause, count] : values.group_takeovers_by_cause) {
      prometheus::ClientMetric& metric = families.back().metric.emplace_back();
      metric.counter.value = static_cast<double>(count);
      metric.label.push_back({"cause", cause});
    }
    AddObjectGauges(values.objects, &families);
    AddProcessMetrics(&families);
    return families;
  }

 private:
  static prometheus::MetricFamily Family(MetricId id) {
    prometheus::MetricFamily family;
    family.name = std::string(Info(id).name);
    family.help = std::string(Info(id).help);
    family.type =
        Info(id).type == MetricType::kCounter ? prometheus::MetricType::Counter : prometheus::MetricType::Gauge;
    return family;
  }

  static void AddValue(double value, const std::map<std::string, std::string>& labels,
                       prometheus::MetricFamily* family) {
    prometheus::ClientMetric metric;
    metric.gauge.value = value;
    for (const auto& [name, text] : labels) metric.label.push_back({name, text});
    family->metric.push_back(std::move(metric));
  }

  const std::string version_;
  const std::function<GaugeValues()> read_;
};

}  // namespace

const std::vector<MetricInfo>& MetricTable() {
  static const auto* const table = new std::vector<MetricInfo>{
#define WEIGHTBROKER_METRIC_ROW(enumerator, name, type, labels, help) {name, MetricType::type, labels, help},
      WEIGHTBROKER_METRICS(WEIGHTBROKER_METRIC_ROW)
#undef WEIGHTBROKER_METRIC_ROW
  };
  return *table;
}

std::string_view RpcMethodName(RpcMethod method) { return kRpcMethodNames[static_cast<size_t>(method)]; }

std::string MismatchFieldLabel(const std::string& field) {
  if (field.compare(0, kFilePrefix.size(), kFilePrefix) == 0) {
    return absl::StrCat(ToAbsl(kFilePrefix), field.substr(field.rfind('.') + 1));
  }
  for (const std::string_view known : {"spec.", "environment.", "device.", "checkpoint."}) {
    if (field.compare(0, known.size(), known) == 0) return field;
  }
  return "other";
}

Metrics::Metrics(const std::string& version, std::function<GaugeValues()> read_gauges)
    : registry_(std::make_shared<prometheus::Registry>()),
      gauges_(std::make_shared<GaugeCollector>(version, std::move(read_gauges))),
      loads_(AddCounters(MetricId::kLoadsTotal)),
      degraded_loads_(AddCounters(MetricId::kDegradedLoadsTotal)),
      publications_(AddCounters(MetricId::kPublicationsTotal)),
      adoptions_(AddCounters(MetricId::kAdoptionsTotal)),
      exporters_ended_(AddCounters(MetricId::kExportersEndedTotal)),
      exports_(AddCounters(MetricId::kExportsTotal)),
      unverified_exports_(AddCounters(MetricId::kUnverifiedExportsTotal)),
      evictions_(AddCounters(MetricId::kEvictionsTotal)),
      evicted_bytes_(AddCounters(MetricId::kEvictedBytesTotal)),
      alias_changes_(AddCounters(MetricId::kAliasChangesTotal)),
      desired_reads_(AddCounters(MetricId::kDesiredReadsTotal)),
      desired_failures_(AddCounters(MetricId::kDesiredFailuresTotal)),
      refusals_(AddCounters(MetricId::kRefusalsTotal)),
      mismatches_(AddCounters(MetricId::kFingerprintMismatchesTotal)),
      rpcs_(AddCounters(MetricId::kRpcsTotal)),
      connections_refused_(AddCounters(MetricId::kConnectionsRefusedTotal)),
      scrubs_(AddCounters(MetricId::kScrubsTotal)),
      scrubbed_bytes_(AddCounters(MetricId::kScrubbedBytesTotal)),
      integrity_failures_(AddCounters(MetricId::kIntegrityFailuresTotal)),
      damage_reports_(AddCounters(MetricId::kDamageReportsTotal)),
      device_faults_(AddCounters(MetricId::kDeviceFaultsTotal)),
      limits_hit_(AddCounters(MetricId::kLimitsHitTotal)),
      outcomes_(*registry_, kRpcMethodNames, kRpcMethodCount) {
  const auto histograms = [&](MetricId id) -> prometheus::Family<prometheus::Histogram>& {
    return prometheus::BuildHistogram()
        .Name(std::string(Info(id).name))
        .Help(std::string(Info(id).help))
        .Register(*registry_);
  };
  load_seconds_ = &histograms(MetricId::kLoadSeconds).Add({}, kLoadBuckets);
  auto& rpc_seconds = histograms(MetricId::kRpcDurationSeconds);
  for (size_t i = 0; i < kRpcMethodCount; ++i) {
    rpc_seconds_[i] = &rpc_seconds.Add({{"method", std::string(kRpcMethodNames[i])}}, kRpcBuckets);
    for (size_t code = 0; code < kStatusCodeCount; ++code) {
      rpc_counters_[i][code] = &rpcs_.Add({{"method", std::string(kRpcMethodNames[i])},
                                           {"code", absl::StatusCodeToString(static_cast<absl::StatusCode>(code))}});
    }
  }
  // A series that is not there before its first event hides that event from rate().
  for (const char* result : kLoadResults) loads_.Add({{"result", result}});
  for (const char* reason : {"no_io_uring", "not_pinned"}) degraded_loads_.Add({{"reason", reason}});
  for (const char* result : {"resident", "given_up"}) publications_.Add({{"result", result}});
  for (const char* result : kAdoptionResults) adoptions_.Add({{"result", result}});
  exporters_ended_.Add({});
  evictions_.Add({});
  evicted_bytes_.Add({});
  for (const char* result : {"set", "deleted"}) alias_changes_.Add({{"result", result}});
  for (const char* result : {"taken", "refused"}) desired_reads_.Add({{"result", result}});
  for (const std::string& reason : ReasonLabels()) desired_failures_.Add({{"reason", reason}});
  for (const char* result : kExportResults) exports_.Add({{"result", result}});
  for (const char* result : {"allowed", "refused"}) unverified_exports_.Add({{"result", result}});
  for (const std::string_view reason : kConnectionReasons) connections_refused_.Add({{"reason", std::string(reason)}});
  for (const std::string& reason : ReasonLabels()) refusals_.Add({{"reason", reason}});
  for (const char* field : kMismatchFields) mismatches_.Add({{"field", field}});
  for (const char* outcome : kScrubOutcomes) scrubs_.Add({{"result", outcome}});
  for (Counters* plain : {&scrubbed_bytes_, &integrity_failures_}) plain->Add({});
  for (const char* result : {"scrubbed", "ignored"}) damage_reports_.Add({{"result", result}});
  for (const char* limit : kLimits) limits_hit_.Add({{"limit", limit}});
}

// The listener's thread looks every two seconds only whether it is to end, unless somebody connects. A broker that is
// replaced must not keep its successor waiting for that.
Metrics::~Metrics() { StopServing(); }

void Metrics::StopServing() {
  if (exposer_ == nullptr) return;
  std::atomic<bool> ended{false};
  auto waking = StartThread("the end of the metrics", [&] {
    while (!ended) {
      ConnectTo(port_);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  });
  exposer_ = nullptr;  // takes two seconds where there is no thread to be had
  ended = true;
  if (waking.ok()) waking->join();
}

Metrics::Counters& Metrics::AddCounters(MetricId id) {
  return prometheus::BuildCounter()
      .Name(std::string(Info(id).name))
      .Help(std::string(Info(id).help))
      .Register(*registry_);
}

void Metrics::CountLoad(LoadResult result, double seconds) {
  loads_.Add({{"result", kLoadResults[static_cast<size_t>(result)]}}).Increment();
  if (result == LoadResult::kResident) load_seconds_->Observe(seconds);
}

void Metrics::CountDegradedLoad(std::string_view reason) {
  degraded_loads_.Add({{"reason", std::string(reason)}}).Increment();
}

void Metrics::CountPublication(bool resident) {
  publications_.Add({{"result", resident ? "resident" : "given_up"}}).Increment();
}

void Metrics::CountAdoptions(AdoptionResult result, int count) {
  adoptions_.Add({{"result", kAdoptionResults[static_cast<size_t>(result)]}}).Increment(count);
}

void Metrics::CountExporterEnded() { exporters_ended_.Add({}).Increment(); }

void Metrics::CountExport(ExportResult result) {
  exports_.Add({{"result", kExportResults[static_cast<size_t>(result)]}}).Increment();
}

void Metrics::CountUnverifiedExport(bool allowed) {
  unverified_exports_.Add({{"result", allowed ? "allowed" : "refused"}}).Increment();
}

void Metrics::CountEviction(int64_t bytes) {
  evictions_.Add({}).Increment();
  evicted_bytes_.Add({}).Increment(static_cast<double>(bytes));
}

void Metrics::CountAliasChange(const std::string& result) { alias_changes_.Add({{"result", result}}).Increment(); }

void Metrics::CountDesiredRead(bool taken) {
  desired_reads_.Add({{"result", taken ? "taken" : "refused"}}).Increment();
}

void Metrics::CountDesiredFailure(const std::string& reason) {
  desired_failures_.Add({{"reason", ReasonLabel(reason)}}).Increment();
}

void Metrics::CountRefusal(const std::string& reason) { refusals_.Add({{"reason", ReasonLabel(reason)}}).Increment(); }

void Metrics::CountFingerprintMismatch(const std::string& field) {
  mismatches_.Add({{"field", MismatchFieldLabel(field)}}).Increment();
}

void Metrics::CountConnectionRefused(const std::string& reason) {
  connections_refused_.Add({{"reason", Contains(kConnectionReasons, reason) ? reason : "other"}}).Increment();
}

void Metrics::CountScrub(ScrubOutcome outcome, int64_t checked_bytes, int64_t damaged_tensors) {
  scrubs_.Add({{"result", kScrubOutcomes[static_cast<size_t>(outcome)]}}).Increment();
  scrubbed_bytes_.Add({}).Increment(static_cast<double>(checked_bytes));
  integrity_failures_.Add({}).Increment(static_cast<double>(damaged_tensors));
}

void Metrics::CountDamageReport(bool scrubbed) {
  damage_reports_.Add({{"result", scrubbed ? "scrubbed" : "ignored"}}).Increment();
}

void Metrics::CountDeviceFault(const std::string& gpu_uuid, const std::string& kind) {
  device_faults_.Add({{"gpu_uuid", gpu_uuid}, {"kind", kind}}).Increment();
}

void Metrics::CountLimitHit(const std::string& limit) { limits_hit_.Add({{"limit", limit}}).Increment(); }

void Metrics::ObserveRpcDuration(RpcMethod method, double seconds) {
  rpc_seconds_[static_cast<size_t>(method)]->Observe(seconds);
}

void Metrics::CountRpc(RpcMethod method, absl::StatusCode code) {
  const size_t code_index = std::min(static_cast<size_t>(code), kStatusCodeCount - 1);
  rpc_counters_[static_cast<size_t>(method)][code_index]->Increment();
}

namespace {

// Why nothing can listen there; 0 if it could now.
int ErrnoOfListening(int port) {
  const UniqueFd probe(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!probe.valid()) return errno;
  const int reuse = 1;  // as the server does: a port whose connections are but being forgotten is free
  setsockopt(probe.get(), SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof(reuse));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return bind(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ? 0 : errno;
}

absl::Status NotServable(const std::string& address, int port) {
  const int error = ErrnoOfListening(port);
  std::string why = error == 0 ? "why is not known, and it was free a moment later" : strerror(error);
  if (error == EADDRINUSE) why = "another program has the port, maybe another service";
  return MakeError(
      Reason::kSystemError,
      absl::StrCat("metrics cannot be served on ", address, " (--metrics_address): ", why,
                   "; give this service another port (--metrics_address=127.0.0.1:PORT), or none "
                   "(--metrics_address=)"),
      {{"address", address}, {"flag", "metrics_address"}, {"errno", error == 0 ? "" : strerrorname_np(error)}});
}

}  // namespace

absl::StatusOr<int> Metrics::Serve(int port) {
  const std::string address = absl::StrCat("127.0.0.1:", port);
  try {
    exposer_ = std::make_unique<prometheus::Exposer>(address, /*num_threads=*/2);
    exposer_->RegisterCollectable(registry_);
    exposer_->RegisterCollectable(gauges_);
    port_ = exposer_->GetListeningPorts().at(0);
    return port_;
  } catch (const std::exception&) {  // it says "null context", whatever the kernel has said
    exposer_ = nullptr;
    return NotServable(address, port);
  }
}

std::string Metrics::Render() const {
  std::vector<prometheus::MetricFamily> families = registry_->Collect();
  for (prometheus::MetricFamily& family : gauges_->Collect()) families.push_back(std::move(family));
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace weightbroker
