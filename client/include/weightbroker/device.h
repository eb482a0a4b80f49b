// Where weights lie: in host memory, or on a GPU.
//
//   if (weights->device().kind == weightbroker::DeviceKind::kCuda) Use(weights->device().ordinal);
//
// A value.
#pragma once

#include <string>

namespace weightbroker {

enum class DeviceKind { kHost, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kHost;
  // The GPU's number in this process, as CUDA's runtime and torch count under this process's CUDA_VISIBLE_DEVICES; -1
  // on the host. Another process may count otherwise.
  int ordinal = -1;
  // What identifies the GPU everywhere: "GPU-" and 32 hexadecimal digits in five groups. Empty on the host.
  std::string uuid;
};

}  // namespace weightbroker
