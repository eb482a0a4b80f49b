// What Prometheus sees. Every metric is a row of one table; docs/metrics.md has the same rows, and a test checks that.
//
//   Metrics metrics(version, [&] { return ReadGauges(); });
//   RETURN_IF_ERROR(metrics.Serve(9464));                     // on loopback only; SYSTEM_ERROR if the port is taken
//   metrics.ObserveRpc(RpcMethod::kHealth, absl::StatusCode::kOk, seconds);
//
// Label values come from bounded sets: what a caller or a file can name freely is folded into "other" or left out.
// Thread-safe.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/broker/detail_metric_rows.h"
#include "server/broker/object_gauges.h"
#include "server/broker/outcome_metrics.h"

namespace prometheus {
class Collectable;
class Counter;
class Exposer;
class Histogram;
class Registry;
template <typename T>
class Family;
}  // namespace prometheus

namespace weightbroker {

enum class MetricType { kCounter, kGauge, kHistogram };

struct MetricInfo {
  std::string_view name;
  MetricType type;
  std::string_view labels;  // comma-separated; empty for none
  std::string_view help;    // plain: prometheus-cpp does not escape it
};

// X(enumerator, name, type, labels, help)
#define WEIGHTBROKER_METRICS(X)                                                                                     \
  X(kBuildInfo, "weightbroker_build_info", kGauge, "version", "Always 1; the labels say what is running.")          \
  X(kWeightSets, "weightbroker_weight_sets", kGauge, "state", "Weight sets that the service knows, by state.")      \
  X(kResidentShards, "weightbroker_resident_shards", kGauge, "",                                                    \
    "Shards of resident weight sets: one for each rank that is held here.")                                         \
  X(kResidentBytes, "weightbroker_resident_bytes", kGauge, "", "Memory that resident weight sets take.")            \
  X(kResidentTensors, "weightbroker_resident_tensors", kGauge, "", "Tensors in resident weight sets, aliases too.") \
  X(kPublisherWritableShards, "weightbroker_publisher_writable_shards", kGauge, "",                                 \
    "Resident shards in GPU memory that the process which published them could still write to.")                    \
  X(kReservedBytes, "weightbroker_reserved_bytes", kGauge, "",                                                      \
    "Memory that is granted to resident weight sets and to loads under way.")                                       \
  X(kDeviceReservedBytes, "weightbroker_device_reserved_bytes", kGauge, "device",                                   \
    "The same of each device that the service has: host, or a GPU by its UUID.")                                    \
  X(kQuarantinedShards, "weightbroker_quarantined_shards", kGauge, "",                                              \
    "Resident shards in quarantine: found damaged, or on a GPU that was found faulty. None of them is exported.")   \
  X(kLeases, "weightbroker_leases", kGauge, "", "Leases that engines hold now.")                                    \
  X(kOpenConnections, "weightbroker_open_connections", kGauge, "", "Open gRPC connections.")                        \
  X(kLoadsTotal, "weightbroker_loads_total", kCounter, "result",                                                    \
    "Loads that have ended: resident, failed, stalled (the loader made no progress and was killed), cancelled.")    \
  X(kDegradedLoadsTotal, "weightbroker_degraded_loads_total", kCounter, "reason",                                   \
    "Loads that were slower than they could be: no_io_uring, not_pinned (no memory to pin for the way to a GPU).")  \
  X(kPublicationsTotal, "weightbroker_publications_total", kCounter, "result",                                      \
    "Weight sets that engines have begun to publish: resident, given_up.")                                          \
  X(kAdoptionsTotal, "weightbroker_adoptions_total", kCounter, "result",                                            \
    "What the broker before this one left behind: weight sets adopted, loads restarted, records dropped.")          \
  X(kExportersEndedTotal, "weightbroker_exporters_ended_total", kCounter, "",                                       \
    "Processes that exported a set by CUDA IPC and have ended although the set is resident.")                       \
  X(kLoadSeconds, "weightbroker_load_seconds", kHistogram, "",                                                      \
    "Time from Register to residency, of loads that got there.")                                                    \
  X(kExportsTotal, "weightbroker_exports_total", kCounter, "result",                                                \
    "Exports: granted (with a lease), renewed (a lease that ended with its broker), looked (without), refused.")    \
  X(kUnverifiedExportsTotal, "weightbroker_unverified_exports_total", kCounter, "result",                           \
    "Exports by spec of what is resident while files that it was made from are gone: allowed, refused.")            \
  X(kEvictionsTotal, "weightbroker_evictions_total", kCounter, "",                                                  \
    "Weight sets that nobody used and that were released to make room for others.")                                 \
  X(kEvictedBytesTotal, "weightbroker_evicted_bytes_total", kCounter, "", "Memory that those took.")                \
  X(kPinnedWeightSets, "weightbroker_pinned_weight_sets", kGauge, "", "Weight sets that are never evicted.")        \
  X(kAliases, "weightbroker_aliases", kGauge, "", "Aliases that name a resident weight set.")                       \
  X(kAliasChangesTotal, "weightbroker_alias_changes_total", kCounter, "result",                                     \
    "Changes of aliases: set (to a first set, or moved), deleted.")                                                 \
  X(kDesiredSets, "weightbroker_desired_sets", kGauge, "state",                                                     \
    "Weight sets that the service is configured to hold: waiting, loading, resident, failed, quarantined, "         \
    "draining.")                                                                                                    \
  X(kDesiredAliases, "weightbroker_desired_aliases", kGauge, "state",                                               \
    "Aliases that the service is configured to have: in_place, missing (or naming another set), failed.")           \
  X(kDesiredFileRefused, "weightbroker_desired_file_refused", kGauge, "",                                           \
    "1 if the file of --desired was wrong when it was last read: what this broker read before, if anything, is in " \
    "force; else 0.")                                                                                               \
  X(kDesiredReadsTotal, "weightbroker_desired_reads_total", kCounter, "result",                                     \
    "Readings of the file of --desired: taken, refused.")                                                           \
  X(kDesiredFailuresTotal, "weightbroker_desired_failures_total", kCounter, "reason",                               \
    "Attempts to make a configured set resident that have failed, by reason (see docs/errors.md).")                 \
  X(kRefusalsTotal, "weightbroker_refusals_total", kCounter, "reason",                                              \
    "Calls that ended with an error, by its reason (see docs/errors.md).")                                          \
  X(kFingerprintMismatchesTotal, "weightbroker_fingerprint_mismatches_total", kCounter, "field",                    \
    "Fields in which a wanted weight set differed from the resident one; names of files are left out.")             \
  X(kRpcsTotal, "weightbroker_rpcs_total", kCounter, "method,code", "Calls that have ended, by method and code.")   \
  X(kRpcDurationSeconds, "weightbroker_rpc_duration_seconds", kHistogram, "method",                                 \
    "Time that a call took; of Export, until the manifest was sent.")                                               \
  X(kConnectionsRefusedTotal, "weightbroker_connections_refused_total", kCounter, "reason",                         \
    "Connections refused or dropped before they reached gRPC, and tickets refused.")                                \
  X(kScrubsTotal, "weightbroker_scrubs_total", kCounter, "result",                                                  \
    "Shards whose bytes were to be checked: intact, damaged, not_checked (the check itself failed).")               \
  X(kScrubbedBytesTotal, "weightbroker_scrubbed_bytes_total", kCounter, "", "Bytes that scrubs have read.")         \
  X(kIntegrityFailuresTotal, "weightbroker_integrity_failures_total", kCounter, "",                                 \
    "Tensors that a scrub found to differ from their digest.")                                                      \
  X(kDamageReportsTotal, "weightbroker_damage_reports_total", kCounter, "result",                                   \
    "Reports of engines that bytes differ: scrubbed (a scrub answers it), ignored (one had just been made).")       \
  X(kDeviceFaultsTotal, "weightbroker_device_faults_total", kCounter, "gpu_uuid,kind",                              \
    "Faults of GPUs that put their shards in quarantine: xid, double_bit_ecc.")                                     \
  X(kDeviceEventsUnwatched, "weightbroker_device_events_unwatched", kGauge, "",                                     \
    "1 if GPUs are served and their faults are not noticed, because NVML has no events; else 0.")                   \
  X(kLimitsHitTotal, "weightbroker_limits_hit_total", kCounter, "limit",                                            \
    "Calls and connections refused because their user was at a limit, by the limit's flag.")                        \
  X(kLogLinesDroppedTotal, "weightbroker_log_lines_dropped_total", kCounter, "",                                    \
    "Log lines that the broker dropped because whoever reads its stderr did not keep up.")                          \
  X(kGroups, "weightbroker_groups", kGauge, "", "Engine groups that the service keeps.")                            \
  X(kGroupMembers, "weightbroker_group_members", kGauge, "role",                                                    \
    "Members of engine groups: active, standby, superseded (hung while active; another has taken over).")           \
  X(kGroupTakeoversTotal, "weightbroker_group_takeovers_total", kCounter, "cause",                                  \
    "Members of engine groups that became active after another one, which had died, hung or left.")                 \
  WEIGHTBROKER_DETAIL_METRICS(X)

enum class MetricId {
#define WEIGHTBROKER_METRIC_ENUMERATOR(enumerator, name, type, labels, help) enumerator,
  WEIGHTBROKER_METRICS(WEIGHTBROKER_METRIC_ENUMERATOR)
#undef WEIGHTBROKER_METRIC_ENUMERATOR
};

// The whole table, in the order of MetricId.
const std::vector<MetricInfo>& MetricTable();

enum class RpcMethod {
  kRegister,
  kFingerprint,
  kExport,
  kAllocateSlabs,
  kCommit,
  kHealth,
  kListWeightSets,
  kUnregister,
  kHealthCheck,
  kHealthWatch,
  kScrub,
  kReportDamage,
  kReportAttach,
  kJoinGroup,
  kListGroups,
  kRemoveGroup,
  kSetAlias,
  kDeleteAlias,
};
inline constexpr size_t kRpcMethodCount = 18;
inline constexpr size_t kStatusCodeCount = 17;
std::string_view RpcMethodName(RpcMethod method);

enum class LoadResult { kResident, kFailed, kStalled, kCancelled };
enum class AdoptionResult { kAdopted, kRestarted, kDropped };
enum class ExportResult { kGranted, kRenewed, kLooked, kRefused };
enum class ScrubOutcome { kIntact, kDamaged, kNotChecked };

// What is read at the moment of a scrape.
struct GaugeValues {
  std::map<std::string, int> weight_sets_by_state;  // every state that can be listed, also those with 0
  int64_t resident_shards = 0;
  int64_t resident_bytes = 0;
  int64_t resident_tensors = 0;
  int64_t publisher_writable_shards = 0;
  int pinned_weight_sets = 0;
  int aliases = 0;
  std::map<std::string, int> desired_sets_by_state;     // every state, also those with 0
  std::map<std::string, int> desired_aliases_by_state;  // likewise
  bool desired_file_refused = false;
  int64_t quarantined_shards = 0;
  bool device_events_unwatched = false;
  int64_t reserved_bytes = 0;
  std::map<std::string, int64_t> reserved_bytes_by_device;  // every device, also those with 0
  int leases = 0;
  int open_connections = 0;
  int groups = 0;
  std::map<std::string, int> group_members_by_role;         // every role, also those with 0
  std::map<std::string, int64_t> group_takeovers_by_cause;  // likewise
  ObjectGauges objects;
};

// A fingerprint's field without the name of a file in it: "checkpoint.files.a.safetensors.header_sha256" becomes
// "checkpoint.files.header_sha256"; what is not of a known kind becomes "other".
std::string MismatchFieldLabel(const std::string& field);

class Metrics {
 public:
  Metrics(const std::string& version, std::function<GaugeValues()> read_gauges);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  void CountLoad(LoadResult result, double seconds);
  void CountDegradedLoad(std::string_view reason);
  void CountPublication(bool resident);
  void CountAdoptions(AdoptionResult result, int count);
  void CountExporterEnded();
  void CountExport(ExportResult result);
  void CountUnverifiedExport(bool allowed);
  void CountEviction(int64_t bytes);
  void CountAliasChange(const std::string& result);
  void CountDesiredRead(bool taken);
  void CountDesiredFailure(const std::string& reason);
  void CountRefusal(const std::string& reason);
  void CountFingerprintMismatch(const std::string& field);
  void CountConnectionRefused(const std::string& reason);
  void CountScrub(ScrubOutcome outcome, int64_t checked_bytes, int64_t damaged_tensors);
  void CountDamageReport(bool scrubbed);
  void CountDeviceFault(const std::string& gpu_uuid, const std::string& kind);
  void CountLimitHit(const std::string& limit);
  void ObserveRpcDuration(RpcMethod method, double seconds);
  void CountRpc(RpcMethod method, absl::StatusCode code);
  OutcomeMetrics& outcomes() { return outcomes_; }

  // Serves /metrics on 127.0.0.1:`port`; 0 takes a free one. Gives the port. SYSTEM_ERROR naming the address if it
  // cannot.
  absl::StatusOr<int> Serve(int port);

  // What a scrape would get.
  std::string Render() const;

  // No scrape is under way when it returns, and none will be. Harmless twice.
  void StopServing();

 private:
  using Counters = prometheus::Family<prometheus::Counter>;

  Counters& AddCounters(MetricId id);

  std::shared_ptr<prometheus::Registry> registry_;
  std::shared_ptr<prometheus::Collectable> gauges_;
  Counters& loads_;
  Counters& degraded_loads_;
  Counters& publications_;
  Counters& adoptions_;
  Counters& exporters_ended_;
  Counters& exports_;
  Counters& unverified_exports_;
  Counters& evictions_;
  Counters& evicted_bytes_;
  Counters& alias_changes_;
  Counters& desired_reads_;
  Counters& desired_failures_;
  Counters& refusals_;
  Counters& mismatches_;
  Counters& rpcs_;
  Counters& connections_refused_;
  Counters& scrubs_;
  Counters& scrubbed_bytes_;
  Counters& integrity_failures_;
  Counters& damage_reports_;
  Counters& device_faults_;
  Counters& limits_hit_;
  OutcomeMetrics outcomes_;
  prometheus::Histogram* load_seconds_ = nullptr;
  std::array<prometheus::Histogram*, kRpcMethodCount> rpc_seconds_ = {};
  // Found once and kept: looking a series up by its labels costs more than the rest of a Health call's accounting.
  std::array<std::array<prometheus::Counter*, kStatusCodeCount>, kRpcMethodCount> rpc_counters_ = {};
  std::unique_ptr<prometheus::Exposer> exposer_;
  int port_ = 0;  // the exposer's
};

}  // namespace weightbroker
