// How the example engines read memory of a GPU: with CUDA's runtime and nothing of weightbroker. In a build without
// CUDA's runtime (gpu_memory_none.cc) all of it fails, saying so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "client/examples/example_support.h"

namespace example {

// A shard's tensors, brought to the host from GPU `device` (as this process counts) so that they can be compared with
// those of an engine on the host. An engine that computes on the GPU needs no such copy.
class HostCopy {
 public:
  // `views` are of addresses on the GPU, and must outlive the object. Empty `error` if it went well.
  HostCopy(int device, const std::vector<View>& views, std::string* error);

  // The same tensors, on the host.
  const std::vector<View>& views() const { return views_; }

 private:
  std::vector<std::vector<char>> bytes_;
  std::vector<View> views_;
};

// Copies `size` bytes of the host to an address of GPU `device` (as this process counts). Empty if it went well.
std::string CopyToGpu(int device, void* to, const void* from, size_t size);

// A slab of another process, opened by its CUDA IPC handle; closed when the object goes.
class IpcSlab {
 public:
  // On the GPU with that UUID ("GPU-..."). Empty `error` if it went well.
  IpcSlab(const std::string& gpu_uuid, std::string_view handle, std::string* error);
  ~IpcSlab();
  IpcSlab(const IpcSlab&) = delete;
  IpcSlab& operator=(const IpcSlab&) = delete;

  int device() const { return device_; }      // as this process counts
  const void* data() const { return data_; }  // an address on the GPU

 private:
  int device_ = -1;
  void* data_ = nullptr;
};

}  // namespace example
