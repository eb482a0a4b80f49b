// Runs of elements that land apart from each other, as the columns of a matrix that is transposed do: shared by the
// kernel, whoever launches it, and the tests' stand-in for a GPU.
#pragma once

#include <cstdint>

#include "common/device/kernels/host_device.h"

namespace weightbroker {

inline constexpr char kScatterKernelName[] = "weightbroker_scatter";
inline constexpr unsigned kScatterThreads = 256;

// Element e of run r lies at `from + r * from_stride_bytes + e * element_bytes`, and goes to element `r * stride + e *
// element_stride` of `to`. `from` need not be aligned.
struct ScatterRuns {
  uint64_t from = 0;
  uint64_t to = 0;
  int64_t run_elements = 0;
  int64_t run_count = 0;
  int64_t from_stride_bytes = 0;
  int64_t stride = 0;
  int64_t element_stride = 0;
  int64_t element_bytes = 0;
};

// Moves the element with this number, counted run by run.
WEIGHTBROKER_HOST_DEVICE inline void ScatterElement(const ScatterRuns& runs, int64_t number) {
  const int64_t run = number / runs.run_elements;
  const int64_t element = number % runs.run_elements;
  const auto* const from =
      reinterpret_cast<const unsigned char*>(runs.from) + run * runs.from_stride_bytes + element * runs.element_bytes;
  auto* const to = reinterpret_cast<unsigned char*>(runs.to) +
                   (run * runs.stride + element * runs.element_stride) * runs.element_bytes;
  for (int64_t i = 0; i < runs.element_bytes; ++i) to[i] = from[i];
}

}  // namespace weightbroker
