#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "client/examples/gpu_memory.h"

namespace example {
namespace {

// Notes the first error only: those that follow come of it.
bool Succeeded(cudaError_t result, const char* what, std::string* error) {
  if (result == cudaSuccess) return true;
  if (error->empty()) *error = std::string(what) + ": " + cudaGetErrorString(result);
  return false;
}

std::string FormatUuid(const cudaUUID_t& uuid) {
  std::string text = "GPU";
  for (size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    char digits[3];
    snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned char>(uuid.bytes[i]));
    text += digits;
  }
  return text;
}

// Its number in this process; -1 if it is not seen here.
int FindDevice(const std::string& gpu_uuid) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return -1;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, i) == cudaSuccess && FormatUuid(properties.uuid) == gpu_uuid) return i;
  }
  return -1;
}

}  // namespace

HostCopy::HostCopy(int device, const std::vector<View>& views, std::string* error) : views_(views) {
  Succeeded(cudaSetDevice(device), "cudaSetDevice", error);
  bytes_.reserve(views_.size());
  for (View& view : views_) {
    std::vector<char>& copy = bytes_.emplace_back(view.bytes.size());
    if (copy.empty()) continue;
    Succeeded(cudaMemcpy(copy.data(), view.bytes.data(), copy.size(), cudaMemcpyDeviceToHost), "cudaMemcpy", error);
    view.bytes = {copy.data(), copy.size()};
  }
}

std::string CopyToGpu(int device, void* to, const void* from, size_t size) {
  std::string error;
  Succeeded(cudaSetDevice(device), "cudaSetDevice", &error);
  Succeeded(cudaMemcpy(to, from, size, cudaMemcpyHostToDevice), "cudaMemcpy", &error);
  return error;
}

IpcSlab::IpcSlab(const std::string& gpu_uuid, std::string_view handle, std::string* error)
    : device_(FindDevice(gpu_uuid)) {
  cudaIpcMemHandle_t opened;
  if (device_ < 0) {
    *error = "this process does not see the GPU " + gpu_uuid + ", which holds the weights";
  } else if (handle.size() != sizeof(opened)) {
    *error = "a CUDA IPC handle has another length";
  } else if (Succeeded(cudaSetDevice(device_), "cudaSetDevice", error)) {
    memcpy(&opened, handle.data(), sizeof(opened));
    Succeeded(cudaIpcOpenMemHandle(&data_, opened, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle", error);
  }
}

IpcSlab::~IpcSlab() {
  if (data_ != nullptr) cudaIpcCloseMemHandle(data_);
}

}  // namespace example
