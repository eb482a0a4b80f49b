// The gauges that there are one of for each GPU, device and weight set. A series goes with its object: each scrape
// renders what is there then. And what the machine has left, as far as it could be asked.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace prometheus {
struct MetricFamily;
}  // namespace prometheus

namespace weightbroker {

struct GpuGauges {
  std::string uuid;
  std::string name;
  std::string compute_capability;
  std::string driver_version;
  bool served = false;
  int64_t size_bytes = 0;
  int64_t free_bytes = 0;
};

struct DeviceGauges {
  int64_t resident_bytes = 0;
  int64_t resident_tensors = 0;
};

struct WeightSetGauges {
  std::string fingerprint;
  int64_t bytes = 0;
  int64_t tensors = 0;
  int leases = 0;
};

struct ObjectGauges {
  bool ready = false;  // as Health says it
  int64_t memory_limit_bytes = 0;
  int64_t loading_done_bytes = 0;  // of the loads under way that know how much there is to read
  int64_t loading_size_bytes = 0;
  std::map<std::string, DeviceGauges> devices;  // every one that is served, the host by its name
  std::vector<WeightSetGauges> weight_sets;     // that are resident, or draining
  // What is left is not known if the driver of a GPU does not answer in time.
  bool machine_known = false;
  int64_t host_available_bytes = 0;
  std::vector<GpuGauges> gpus;
};

// Appends their families.
void AddObjectGauges(const ObjectGauges& gauges, std::vector<prometheus::MetricFamily>* families);

}  // namespace weightbroker
