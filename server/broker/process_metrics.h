// What Prometheus' clients say of their own process, under the names that all of them use.
#pragma once

#include <vector>

namespace prometheus {
struct MetricFamily;
}  // namespace prometheus

namespace weightbroker {

// Appends the families of this process. What /proc does not say is left out.
void AddProcessMetrics(std::vector<prometheus::MetricFamily>* families);

}  // namespace weightbroker
