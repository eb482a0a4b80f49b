// Two copies of a shard, byte for byte.
//
//   const Comparison comparison = CompareTensors(resident->tensors(), disk->tensors());
//   if (!comparison.equal()) ... comparison.first->tensor ...
//
// Thread-safe: a pure function.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "weightbroker/tensor.h"

namespace weightbroker::tool {

// Where two copies first differ, by the tensors' order.
struct Difference {
  std::string tensor;
  std::string what;          // "bytes", or "missing on disk", "missing in memory", "dtype", "shape", "alias"
  int64_t offset_bytes = 0;  // in the tensor, where `what` is "bytes"; and then the bytes there
  int resident_byte = 0;
  int disk_byte = 0;
};

struct Comparison {
  int64_t tensors = 0;            // names in either copy
  int64_t bytes = 0;              // compared, aliases not counted
  int64_t differing_tensors = 0;  // in bytes or otherwise
  int64_t differing_bytes = 0;
  std::optional<Difference> first;

  bool equal() const { return differing_tensors == 0; }
};

// Both are sorted by name. An alias is compared by what it is an alias of: its bytes are compared there.
Comparison CompareTensors(const std::vector<Tensor>& resident, const std::vector<Tensor>& disk);

}  // namespace weightbroker::tool
