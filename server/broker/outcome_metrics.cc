#include "server/broker/outcome_metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include "server/broker/metrics.h"
#include "server/broker/reason_labels.h"

namespace weightbroker {
namespace {

constexpr const char* kRegistrations[] = {"hit", "joined", "started", "refused"};
constexpr const char* kChecks[] = {"match", "mismatch", "absent", "unverified", "failed"};
constexpr const char* kAttachOutcomes[] = {"attached", "disk", "failed"};
constexpr const char* kPhases[] = {"plan", "allocate", "read", "digest"};

const prometheus::Histogram::BucketBoundaries kPhaseBuckets = {0.001, 0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 600};
// From a few hundred tensors in host memory to a service that is being replaced.
const prometheus::Histogram::BucketBoundaries kAttachBuckets = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
                                                                0.1,   0.25,   0.5,   1,    5,     30};

const MetricInfo& Info(MetricId id) { return MetricTable()[static_cast<size_t>(id)]; }

prometheus::Family<prometheus::Counter>& Counters(prometheus::Registry& registry, MetricId id) {
  return prometheus::BuildCounter()
      .Name(std::string(Info(id).name))
      .Help(std::string(Info(id).help))
      .Register(registry);
}

template <size_t kCount>
void Fill(prometheus::Family<prometheus::Counter>& family, const char* label, const char* const (&values)[kCount],
          std::array<prometheus::Counter*, kCount>* counters) {
  for (size_t i = 0; i < kCount; ++i) (*counters)[i] = &family.Add({{label, values[i]}});
}

prometheus::Family<prometheus::Counter>& CountersByReason(prometheus::Registry& registry, MetricId id) {
  auto& family = Counters(registry, id);
  for (const std::string& reason : ReasonLabels()) family.Add({{"reason", reason}});
  return family;
}

}  // namespace

OutcomeMetrics::OutcomeMetrics(prometheus::Registry& registry, const std::string_view* methods, size_t method_count)
    : export_refusals_(CountersByReason(registry, MetricId::kExportRefusalsTotal)),
      load_failures_(CountersByReason(registry, MetricId::kLoadFailuresTotal)),
      client_fallbacks_(CountersByReason(registry, MetricId::kClientFallbacksTotal)),
      attach_seconds_(prometheus::BuildHistogram()
                          .Name(std::string(Info(MetricId::kClientAttachSeconds).name))
                          .Help(std::string(Info(MetricId::kClientAttachSeconds).help))
                          .Register(registry)
                          .Add({}, kAttachBuckets)),
      load_read_bytes_(Counters(registry, MetricId::kLoadReadBytesTotal).Add({})),
      last_export_(prometheus::BuildGauge()
                       .Name(std::string(Info(MetricId::kLastExportTimestamp).name))
                       .Help(std::string(Info(MetricId::kLastExportTimestamp).help))
                       .Register(registry)
                       .Add({})) {
  Fill(Counters(registry, MetricId::kRegistrationsTotal), "result", kRegistrations, &registrations_);
  Fill(Counters(registry, MetricId::kFingerprintChecksTotal), "result", kChecks, &checks_);
  Fill(Counters(registry, MetricId::kClientAttachesTotal), "outcome", kAttachOutcomes, &attaches_);
  auto& phases = prometheus::BuildHistogram()
                     .Name(std::string(Info(MetricId::kLoadPhaseSeconds).name))
                     .Help(std::string(Info(MetricId::kLoadPhaseSeconds).help))
                     .Register(registry);
  for (size_t i = 0; i < phases_.size(); ++i) phases_[i] = &phases.Add({{"phase", kPhases[i]}}, kPhaseBuckets);
  auto& started = Counters(registry, MetricId::kRpcsStartedTotal);
  for (size_t i = 0; i < std::min(method_count, kMaxMethods); ++i) {
    started_[i] = &started.Add({{"method", std::string(methods[i])}});
  }
}

void OutcomeMetrics::CountRegistration(Registration result) {
  registrations_[static_cast<size_t>(result)]->Increment();
}

void OutcomeMetrics::CountCheck(FingerprintCheck result) { checks_[static_cast<size_t>(result)]->Increment(); }

void OutcomeMetrics::CountExportRefusal(const std::string& reason) {
  export_refusals_.Add({{"reason", ReasonLabel(reason)}}).Increment();
}

void OutcomeMetrics::NoteExport(double unix_seconds) { last_export_.Set(unix_seconds); }

void OutcomeMetrics::CountLoadFailure(const std::string& reason) {
  load_failures_.Add({{"reason", ReasonLabel(reason)}}).Increment();
}

void OutcomeMetrics::ObserveLoad(int64_t read_bytes) {
  load_read_bytes_.Increment(static_cast<double>(std::max<int64_t>(read_bytes, 0)));
}

void OutcomeMetrics::ObserveLoadPhases(const LoadPhases& phases) {
  const double seconds[] = {phases.plan_seconds, phases.allocate_seconds, phases.read_seconds, phases.digest_seconds};
  for (size_t i = 0; i < phases_.size(); ++i) phases_[i]->Observe(std::max(seconds[i], 0.0));
}

void OutcomeMetrics::CountAttach(AttachOutcome outcome, const std::string& reason) {
  attaches_[static_cast<size_t>(outcome)]->Increment();
  if (outcome != AttachOutcome::kAttached) client_fallbacks_.Add({{"reason", ReasonLabel(reason)}}).Increment();
}

void OutcomeMetrics::ObserveAttach(double seconds) {
  if (seconds >= 0) attach_seconds_.Observe(seconds);
}

void OutcomeMetrics::CountStarted(size_t method) { started_[method]->Increment(); }

}  // namespace weightbroker
