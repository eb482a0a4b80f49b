// The file by which an exporter of one CUDA IPC handle for each tensor tells its importers: in the order of names, of
// each tensor its size and its handle. What an engine's own hand-over would carry, without names and shapes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/device/cuda_driver.h"

namespace weightbroker::bench {

struct TensorHandle {
  int64_t size_bytes = 0;
  CudaIpcHandle handle = {};
};

absl::Status WriteTensorHandles(const std::string& path, const std::vector<TensorHandle>& handles);
absl::StatusOr<std::vector<TensorHandle>> ReadTensorHandles(const std::string& path);

}  // namespace weightbroker::bench
