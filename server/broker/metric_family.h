// Families of the table in metrics.h that are made anew for each scrape.
//
//   AddFamily(MetricId::kLeases, &families).Add(3);
//   AddFamily(MetricId::kDeviceInfo, &families).Add(1, {{"gpu_uuid", uuid}});
#pragma once

#include <prometheus/metric_family.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "server/broker/metrics.h"

namespace weightbroker {

// Valid as long as the vector that the family was appended to; others may be appended meanwhile.
class FamilyBuilder {
 public:
  explicit FamilyBuilder(std::vector<prometheus::MetricFamily>* families)
      : families_(families), index_(families->size() - 1) {}

  void Add(double value, const std::map<std::string, std::string>& labels = {}) {
    prometheus::MetricFamily& family = (*families_)[index_];
    prometheus::ClientMetric metric;
    if (family.type == prometheus::MetricType::Counter) {
      metric.counter.value = value;
    } else {
      metric.gauge.value = value;
    }
    for (const auto& [name, text] : labels) metric.label.push_back({name, text});
    family.metric.push_back(std::move(metric));
  }

 private:
  std::vector<prometheus::MetricFamily>* const families_;
  const size_t index_;
};

inline FamilyBuilder AddFamily(MetricId id, std::vector<prometheus::MetricFamily>* families) {
  const MetricInfo& info = MetricTable()[static_cast<size_t>(id)];
  prometheus::MetricFamily family;
  family.name = std::string(info.name);
  family.help = std::string(info.help);
  family.type = info.type == MetricType::kCounter ? prometheus::MetricType::Counter : prometheus::MetricType::Gauge;
  families->push_back(std::move(family));
  return FamilyBuilder(families);
}

}  // namespace weightbroker
