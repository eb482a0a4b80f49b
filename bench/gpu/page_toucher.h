// Reads one word of every 2 MiB of tensors in GPU memory, and sums up what it read.
//
//   ASSIGN_OR_RETURN(PageToucher toucher, PageToucher::Create(context, image_path));   // compiles nothing, moves code
//   ASSIGN_OR_RETURN(const uint64_t sum, toucher.Touch(ranges));                       // in the order of names
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/device/cuda_context.h"

namespace weightbroker::bench {

struct DeviceRange {
  CudaDevicePtr address = 0;
  int64_t size_bytes = 0;
};

class PageToucher {
 public:
  // `image_path` is what touch_pages.cu was compiled to. Takes device memory for the lists of `most_ranges` ranges, so
  // that Touch takes none.
  static absl::StatusOr<PageToucher> Create(const CudaContext& context, const std::string& image_path,
                                            size_t most_ranges);

  // Waits for the GPU.
  absl::StatusOr<uint64_t> Touch(const std::vector<DeviceRange>& ranges) const;

 private:
  explicit PageToucher(const CudaContext& context) : context_(context) {}

  CudaContext context_;
  CudaFunction function_ = nullptr;
  CudaDevicePtr addresses_ = 0;  // freed with the process, as is all that a sample takes
  CudaDevicePtr sizes_ = 0;
  CudaDevicePtr sum_ = 0;
};

}  // namespace weightbroker::bench
