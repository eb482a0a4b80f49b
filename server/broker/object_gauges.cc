#include "server/broker/object_gauges.h"

#include <utility>

#include "server/broker/metric_family.h"

namespace weightbroker {
namespace {

double Number(int64_t value) { return static_cast<double>(value); }

void AddMachine(const ObjectGauges& gauges, std::vector<prometheus::MetricFamily>* families) {
  AddFamily(MetricId::kMachineFactsKnown, families).Add(gauges.machine_known ? 1 : 0);
  if (!gauges.machine_known) return;
  AddFamily(MetricId::kHostAvailableBytes, families).Add(Number(gauges.host_available_bytes));
  if (gauges.gpus.empty()) return;  // a family without a series is no valid text
  FamilyBuilder info = AddFamily(MetricId::kDeviceInfo, families);
  for (const GpuGauges& gpu : gauges.gpus) {
    info.Add(1, {{"gpu_uuid", gpu.uuid},
                 {"name", gpu.name},
                 {"compute_capability", gpu.compute_capability},
                 {"driver_version", gpu.driver_version},
                 {"served", gpu.served ? "true" : "false"}});
  }
  FamilyBuilder size = AddFamily(MetricId::kDeviceMemorySizeBytes, families);
  for (const GpuGauges& gpu : gauges.gpus) size.Add(Number(gpu.size_bytes), {{"gpu_uuid", gpu.uuid}});
  FamilyBuilder free = AddFamily(MetricId::kDeviceMemoryFreeBytes, families);
  for (const GpuGauges& gpu : gauges.gpus) free.Add(Number(gpu.free_bytes), {{"gpu_uuid", gpu.uuid}});
}

void AddDevices(const std::map<std::string, DeviceGauges>& devices, std::vector<prometheus::MetricFamily>* families) {
  if (devices.empty()) return;
  FamilyBuilder bytes = AddFamily(MetricId::kDeviceResidentBytes, families);
  for (const auto& [name, device] : devices) bytes.Add(Number(device.resident_bytes), {{"device", name}});
  FamilyBuilder tensors = AddFamily(MetricId::kDeviceResidentTensors, families);
  for (const auto& [name, device] : devices) tensors.Add(Number(device.resident_tensors), {{"device", name}});
}

void AddWeightSets(const std::vector<WeightSetGauges>& sets, std::vector<prometheus::MetricFamily>* families) {
  if (sets.empty()) return;
  FamilyBuilder bytes = AddFamily(MetricId::kWeightSetBytes, families);
  for (const WeightSetGauges& set : sets) bytes.Add(Number(set.bytes), {{"fingerprint", set.fingerprint}});
  FamilyBuilder tensors = AddFamily(MetricId::kWeightSetTensors, families);
  for (const WeightSetGauges& set : sets) tensors.Add(Number(set.tensors), {{"fingerprint", set.fingerprint}});
  FamilyBuilder leases = AddFamily(MetricId::kWeightSetLeases, families);
  for (const WeightSetGauges& set : sets) leases.Add(set.leases, {{"fingerprint", set.fingerprint}});
}

}  // namespace

void AddObjectGauges(const ObjectGauges& gauges, std::vector<prometheus::MetricFamily>* families) {
  AddFamily(MetricId::kReady, families).Add(gauges.ready ? 1 : 0);
  AddFamily(MetricId::kMemoryLimitBytes, families).Add(Number(gauges.memory_limit_bytes));
  AddFamily(MetricId::kLoadingDoneBytes, families).Add(Number(gauges.loading_done_bytes));
  AddFamily(MetricId::kLoadingSizeBytes, families).Add(Number(gauges.loading_size_bytes));
  AddDevices(gauges.devices, families);
  AddWeightSets(gauges.weight_sets, families);
  AddMachine(gauges, families);
}

}  // namespace weightbroker
