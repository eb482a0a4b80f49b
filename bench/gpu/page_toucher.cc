#include "bench/gpu/page_toucher.h"

#include <fstream>
#include <sstream>

#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker::bench {
namespace {

absl::Status Check(const CudaContext& context, CudaResult result, const char* call) {
  if (result == kCudaSuccess) return absl::OkStatus();
  return CudaError(context.driver(), result, call, "touching every page");
}

absl::StatusOr<std::string> ReadImage(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream bytes;
  bytes << file.rdbuf();
  if (!file || bytes.str().empty()) return SystemError(path, ENOENT);
  return bytes.str();
}

}  // namespace

absl::StatusOr<PageToucher> PageToucher::Create(const CudaContext& context, const std::string& image_path,
                                                size_t most_ranges) {
  ASSIGN_OR_RETURN(const std::string image, ReadImage(image_path));
  PageToucher toucher(context);
  const CudaScope current(context);
  RETURN_IF_ERROR(current.status());
  CudaDriver& driver = context.driver();
  CudaModule module = nullptr;
  RETURN_IF_ERROR(Check(context, driver.ModuleLoadData(image.data(), &module), "cuModuleLoadData"));
  RETURN_IF_ERROR(
      Check(context, driver.ModuleGetFunction(module, "touch_pages", &toucher.function_), "cuModuleGetFunction"));
  const size_t list_bytes = most_ranges * sizeof(uint64_t);
  RETURN_IF_ERROR(Check(context, driver.MemAlloc(list_bytes, &toucher.addresses_), "cuMemAlloc"));
  RETURN_IF_ERROR(Check(context, driver.MemAlloc(list_bytes, &toucher.sizes_), "cuMemAlloc"));
  RETURN_IF_ERROR(Check(context, driver.MemAlloc(sizeof(uint64_t), &toucher.sum_), "cuMemAlloc"));
  return toucher;
}

absl::StatusOr<uint64_t> PageToucher::Touch(const std::vector<DeviceRange>& ranges) const {
  const CudaScope current(context_);
  RETURN_IF_ERROR(current.status());
  CudaDriver& driver = context_.driver();
  std::vector<uint64_t> addresses;
  std::vector<uint64_t> sizes;
  for (const DeviceRange& range : ranges) {
    addresses.push_back(range.address);
    sizes.push_back(static_cast<uint64_t>(range.size_bytes));
  }
  const size_t list_bytes = ranges.size() * sizeof(uint64_t);
  CudaStream stream = nullptr;  // the context's own
  RETURN_IF_ERROR(
      Check(context_, driver.MemcpyHtoDAsync(addresses_, addresses.data(), list_bytes, stream), "cuMemcpyHtoDAsync"));
  RETURN_IF_ERROR(
      Check(context_, driver.MemcpyHtoDAsync(sizes_, sizes.data(), list_bytes, stream), "cuMemcpyHtoDAsync"));
  RETURN_IF_ERROR(Check(context_, driver.MemsetD8Async(sum_, 0, sizeof(uint64_t), stream), "cuMemsetD8Async"));

  CudaDevicePtr address_list = addresses_;
  CudaDevicePtr size_list = sizes_;
  uint64_t count = ranges.size();
  CudaDevicePtr sum_address = sum_;
  void* parameters[] = {&address_list, &size_list, &count, &sum_address};
  CudaLaunch launch;
  launch.grid_blocks = 1024;
  launch.block_threads = 64;
  RETURN_IF_ERROR(Check(context_, driver.LaunchKernel(function_, launch, stream, parameters), "cuLaunchKernel"));
  uint64_t sum = 0;
  RETURN_IF_ERROR(Check(context_, driver.MemcpyDtoHAsync(&sum, sum_, sizeof(sum), stream), "cuMemcpyDtoHAsync"));
  RETURN_IF_ERROR(Check(context_, driver.StreamSynchronize(stream), "cuStreamSynchronize"));
  return sum;
}

}  // namespace weightbroker::bench
