#include "client/tool/compare.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace weightbroker::tool {
namespace {

void Add(Difference difference, Comparison* comparison) {
  ++comparison->differing_tensors;
  if (!comparison->first.has_value()) comparison->first = std::move(difference);
}

// In what two tensors of one name differ besides their bytes; null if in nothing.
const char* DiffersIn(const Tensor& resident, const Tensor& disk) {
  if (resident.dtype != disk.dtype) return "dtype";
  if (!std::equal(resident.shape.begin(), resident.shape.end(), disk.shape.begin(), disk.shape.end())) return "shape";
  if (resident.alias_of != disk.alias_of) return "alias";
  return resident.size_bytes == disk.size_bytes ? nullptr : "shape";
}

// How many bytes differ, and the first that does.
std::pair<int64_t, int64_t> CountDifferences(const Tensor& resident, const Tensor& disk) {
  constexpr int64_t kStepBytes = 1 << 20;  // compared at memory speed, and looked into only where it differs
  int64_t count = 0;
  int64_t first = -1;
  for (int64_t step = 0; step < resident.size_bytes; step += kStepBytes) {
    const int64_t end = std::min(resident.size_bytes, step + kStepBytes);
    if (memcmp(resident.data + step, disk.data + step, static_cast<size_t>(end - step)) == 0) continue;
    for (int64_t i = step; i < end; ++i) {
      if (resident.data[i] == disk.data[i]) continue;
      if (first < 0) first = i;
      ++count;
    }
  }
  return {count, first};
}

void CompareOne(const Tensor& resident, const Tensor& disk, Comparison* comparison) {
  const std::string name(resident.name);
  if (const char* const what = DiffersIn(resident, disk)) return Add({name, what}, comparison);
  if (!resident.alias_of.empty()) return;
  comparison->bytes += resident.size_bytes;
  const auto [count, first] = CountDifferences(resident, disk);
  if (count == 0) return;
  comparison->differing_bytes += count;
  Add({name, "bytes", first, std::to_integer<int>(resident.data[first]), std::to_integer<int>(disk.data[first])},
      comparison);
}

}  // namespace

Comparison CompareTensors(const std::vector<Tensor>& resident, const std::vector<Tensor>& disk) {
  Comparison comparison;
  auto ours = resident.begin();
  auto theirs = disk.begin();
  while (ours != resident.end() || theirs != disk.end()) {
    ++comparison.tensors;
    if (theirs == disk.end() || (ours != resident.end() && ours->name < theirs->name)) {
      Add({std::string(ours++->name), "missing on disk"}, &comparison);
    } else if (ours == resident.end() || theirs->name < ours->name) {
      Add({std::string(theirs++->name), "missing in memory"}, &comparison);
    } else {
      CompareOne(*ours++, *theirs++, &comparison);
    }
  }
  return comparison;
}

}  // namespace weightbroker::tool
