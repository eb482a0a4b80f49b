// The rows of the table in metrics.h for single objects, outcomes in detail, and the broker's own process.
#pragma once

// X(enumerator, name, type, labels, help)
#define WEIGHTBROKER_DETAIL_METRICS(X)                                                                                 \
  X(kReady, "weightbroker_ready", kGauge, "",                                                                          \
    "1 if the service is READY: weights are resident, none are being loaded, and none of those that it is configured " \
    "to hold is missing. 0 if it is IDLE, LOADING, QUARANTINED or DRAINING.")                                          \
  X(kMemoryLimitBytes, "weightbroker_memory_limit_bytes", kGauge, "",                                                  \
    "Host memory that weights may take, as configured; 0 for whatever the machine allows.")                            \
  X(kHostAvailableBytes, "weightbroker_host_available_bytes", kGauge, "",                                              \
    "Host memory that the machine and its cgroup have left.")                                                          \
  X(kMachineFactsKnown, "weightbroker_machine_facts_known", kGauge, "",                                                \
    "1 if what the machine and its GPUs have left could be read for this scrape; if 0, those series are missing.")     \
  X(kDeviceInfo, "weightbroker_device_info", kGauge, "gpu_uuid,name,compute_capability,driver_version,served",         \
    "Always 1, for each GPU here; served says whether weights may be put on it.")                                      \
  X(kDeviceMemorySizeBytes, "weightbroker_device_memory_size_bytes", kGauge, "gpu_uuid", "Memory that the GPU has.")   \
  X(kDeviceMemoryFreeBytes, "weightbroker_device_memory_free_bytes", kGauge, "gpu_uuid",                               \
    "Memory that the GPU has left, whoever took the rest.")                                                            \
  X(kDeviceResidentBytes, "weightbroker_device_resident_bytes", kGauge, "device",                                      \
    "Memory that resident weight sets take on each device that the service has.")                                      \
  X(kDeviceResidentTensors, "weightbroker_device_resident_tensors", kGauge, "device",                                  \
    "Tensors of resident weight sets on each device that the service has, aliases too.")                               \
  X(kWeightSetBytes, "weightbroker_weight_set_bytes", kGauge, "fingerprint",                                           \
    "Memory that each resident weight set takes.")                                                                     \
  X(kWeightSetTensors, "weightbroker_weight_set_tensors", kGauge, "fingerprint",                                       \
    "Tensors in each resident weight set, aliases too.")                                                               \
  X(kWeightSetLeases, "weightbroker_weight_set_leases", kGauge, "fingerprint",                                         \
    "Leases that engines hold on each resident weight set now.")                                                       \
  X(kLoadingDoneBytes, "weightbroker_loading_done_bytes", kGauge, "", "Bytes read so far by loads under way.")         \
  X(kLoadingSizeBytes, "weightbroker_loading_size_bytes", kGauge, "", "Bytes that loads under way read in all.")       \
  X(kLoadPhaseSeconds, "weightbroker_load_phase_seconds", kHistogram, "phase",                                         \
    "Time that loads which got to residency spent in each phase: plan, allocate, read, digest.")                       \
  X(kLoadReadBytesTotal, "weightbroker_load_read_bytes_total", kCounter, "",                                           \
    "Bytes of weights read by loads that got to residency.")                                                           \
  X(kLoadFailuresTotal, "weightbroker_load_failures_total", kCounter, "reason",                                        \
    "Loads and publications that ended without residency, by their reason (see docs/errors.md).")                      \
  X(kRegistrationsTotal, "weightbroker_registrations_total", kCounter, "result",                                       \
    "Registrations by what they found: hit (resident), joined (on its way there), started (begun for it), refused.")   \
  X(kFingerprintChecksTotal, "weightbroker_fingerprint_checks_total", kCounter, "result",                              \
    "Exports by whether what was wanted is what is resident: match, mismatch, absent, unverified, failed (it could "   \
    "not be checked).")                                                                                                \
  X(kExportRefusalsTotal, "weightbroker_export_refusals_total", kCounter, "reason",                                    \
    "Exports that were refused, by reason (see docs/errors.md).")                                                      \
  X(kLastExportTimestamp, "weightbroker_last_export_timestamp_seconds", kGauge, "",                                    \
    "When the latest lease was granted, in seconds since the epoch; 0 if none was since the broker started.")          \
  X(kClientAttachesTotal, "weightbroker_client_attaches_total", kCounter, "outcome",                                   \
    "Attaches as clients report them: attached, disk (the engine loaded the weights itself), failed.")                 \
  X(kClientFallbacksTotal, "weightbroker_client_fallbacks_total", kCounter, "reason",                                  \
    "Attaches that clients report as disk or failed, by the reason why the weights here were not attached.")           \
  X(kClientAttachSeconds, "weightbroker_client_attach_seconds", kHistogram, "",                                        \
    "Time until every tensor had its address, from the request for the lease, as clients report it.")                  \
  X(kRpcsStartedTotal, "weightbroker_rpcs_started_total", kCounter, "method",                                          \
    "Calls that have begun; with weightbroker_rpcs_total it says how many are under way.")                             \
  X(kProcessCpuSeconds, "process_cpu_seconds_total", kCounter, "",                                                     \
    "Processor time that the broker has used, user and system.")                                                       \
  X(kProcessThreads, "process_threads", kGauge, "", "Threads of the broker.")                                          \
  X(kProcessVirtualBytes, "process_virtual_memory_bytes", kGauge, "", "Address space of the broker.")                  \
  X(kProcessResidentBytes, "process_resident_memory_bytes", kGauge, "",                                                \
    "Memory of the broker that is resident; the weights are not in it.")                                               \
  X(kProcessStartTime, "process_start_time_seconds", kGauge, "",                                                       \
    "When the broker started, in seconds since the epoch: each restart changes it.")                                   \
  X(kProcessOpenFds, "process_open_fds", kGauge, "", "Descriptors that the broker has open.")                          \
  X(kProcessMaxFds, "process_max_fds", kGauge, "", "Descriptors that the broker may have open.")
