#include "tests/integration/chaos/tensor_reader.h"

#include <cstdio>
#include <cstdlib>

#include "common/device/cuda_driver.h"
#include "tests/integration/chaos/tally.h"

namespace weightbroker::testing {
namespace {

[[noreturn]] void Give(const std::string& why) {
  fprintf(stderr, "a tensor cannot be read: %s\n", why.c_str());
  exit(kCannotRead);
}

CudaContext ContextOf(int ordinal) {
  const auto driver = LoadCudaDriver();
  if (!driver.ok()) Give(std::string(driver.status().message()));
  const auto context = CudaContext::Retain(**driver, ordinal);
  if (!context.ok()) Give(std::string(context.status().message()));
  return *context;
}

}  // namespace

const void* TensorReader::Read(const MappedWeights& weights, const Tensor& tensor) {
  if (weights.device().kind == DeviceKind::kHost) return tensor.data;
  if (!context_.has_value()) context_ = ContextOf(weights.device().ordinal);
  const CudaScope current(context_);
  CudaDriver& driver = context_.driver();
  copy_.resize(static_cast<size_t>(tensor.size_bytes));
  CudaResult result =
      driver.MemcpyDtoHAsync(copy_.data(), reinterpret_cast<CudaDevicePtr>(tensor.data), copy_.size(), nullptr);
  if (result == kCudaSuccess) result = driver.CtxSynchronize();
  if (result != kCudaSuccess) Give(driver.ErrorName(result) + ": " + driver.ErrorString(result));
  return copy_.data();
}

}  // namespace weightbroker::testing
