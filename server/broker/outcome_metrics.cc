#include "server/broker/outcome_metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <algorithm>
#include <iterator>

#include "common/base/reason.h"
#include "server/broker/metrics.h"

namespace weightbroker {
namespace {

constexpr const char* kRegistrations[] = {"hit", "joined", "started", "refused"};
constexpr const char* kChecks[] = {"match", "mismatch", "absent", "unverified", "failed"};
constexpr const char* kPhases[] = {"plan", "allocate", "read", "digest"};
constexpr std::string_view kReasonNames[] = {
#define WEIGHTBROKER_REASON_NAME(enumerator, name, code) name,
    WEIGHTBROKER_REASONS(WEIGHTBROKER_REASON_NAME)
#undef WEIGHTBROKER_REASON_NAME
};
constexpr char kOtherReason[] = "OTHER";

const prometheus::Histogram::BucketBoundaries kPhaseBuckets = {0.001, 0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 600};

const MetricInfo& Info(MetricId id) { return MetricTable()[static_cast<size_t>(id)]; }

prometheus::Family<prometheus::Counter>& Counters(prometheus::Registry& registry, MetricId id) {
  return prometheus::BuildCounter()
      .Name(std::string(Info(id).name))
      .Help(std::string(Info(id).help))
      .Register(registry);
}

template <size_t kCount>
void Fill(prometheus::Family<prometheus::Counter>& family, const char* const (&values)[kCount],
          std::array<prometheus::Counter*, kCount>* counters) {
  for (size_t i = 0; i < kCount; ++i) (*counters)[i] = &family.Add({{"result", values[i]}});
}

prometheus::Family<prometheus::Counter>& CountersByReason(prometheus::Registry& registry, MetricId id) {
  auto& family = Counters(registry, id);
  for (const std::string_view reason : kReasonNames) family.Add({{"reason", std::string(reason)}});
  family.Add({{"reason", kOtherReason}});
  return family;
}

}  // namespace

std::string KnownReason(const std::string& reason) {
  const bool known = std::find(std::begin(kReasonNames), std::end(kReasonNames), reason) != std::end(kReasonNames);
  return known ? reason : kOtherReason;
}

OutcomeMetrics::OutcomeMetrics(prometheus::Registry& registry, const std::string_view* methods, size_t method_count)
    : export_refusals_(CountersByReason(registry, MetricId::kExportRefusalsTotal)),
      load_failures_(CountersByReason(registry, MetricId::kLoadFailuresTotal)),
      load_read_bytes_(Counters(registry, MetricId::kLoadReadBytesTotal).Add({})),
      last_export_(prometheus::BuildGauge()
                       .Name(std::string(Info(MetricId::kLastExportTimestamp).name))
                       .Help(std::string(Info(MetricId::kLastExportTimestamp).help))
                       .Register(registry)
                       .Add({})) {
  Fill(Counters(registry, MetricId::kRegistrationsTotal), kRegistrations, &registrations_);
  Fill(Counters(registry, MetricId::kFingerprintChecksTotal), kChecks, &checks_);
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
  export_refusals_.Add({{"reason", KnownReason(reason)}}).Increment();
}

void OutcomeMetrics::NoteExport(double unix_seconds) { last_export_.Set(unix_seconds); }

void OutcomeMetrics::CountLoadFailure(const std::string& reason) {
  load_failures_.Add({{"reason", KnownReason(reason)}}).Increment();
}

void OutcomeMetrics::ObserveLoad(int64_t read_bytes) {
  load_read_bytes_.Increment(static_cast<double>(std::max<int64_t>(read_bytes, 0)));
}

void OutcomeMetrics::ObserveLoadPhases(const LoadPhases& phases) {
  const double seconds[] = {phases.plan_seconds, phases.allocate_seconds, phases.read_seconds, phases.digest_seconds};
  for (size_t i = 0; i < phases_.size(); ++i) phases_[i]->Observe(std::max(seconds[i], 0.0));
}

void OutcomeMetrics::CountStarted(size_t method) { started_[method]->Increment(); }

}  // namespace weightbroker
