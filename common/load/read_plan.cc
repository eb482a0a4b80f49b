#include "common/load/read_plan.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "common/base/file.h"
#include "common/memory/digest.h"

namespace weightbroker {
namespace {

// Indices of the tensors that are read, in file order.
std::vector<int32_t> TensorsToRead(const ShardPlan& plan) {
  std::vector<int32_t> indices;
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    if (plan.tensors[i].alias_of.empty() && plan.tensors[i].size_bytes > 0) indices.push_back(static_cast<int32_t>(i));
  }
  std::sort(indices.begin(), indices.end(), [&](int32_t a, int32_t b) {
    const auto key = [&](int32_t i) {
      const TensorPlacement& tensor = plan.tensors[static_cast<size_t>(i)];
      return std::make_tuple(tensor.file_index, tensor.file_offset_bytes);
    };
    return key(a) < key(b);
  });
  return indices;
}

class ItemBuilder {
 public:
  explicit ItemBuilder(int64_t chunk_bytes) : chunk_bytes_(chunk_bytes) {}

  void AddTensor(int32_t index, const TensorPlacement& tensor) {
    for (int64_t offset = 0; offset < tensor.size_bytes;) {
      const int64_t at = tensor.file_offset_bytes + offset;
      if (!Continues(tensor.file_index, at)) StartItem(tensor.file_index, at);
      const int64_t size = SizeThatFits(at, tensor.size_bytes - offset);
      if (size == 0) {
        StartItem(tensor.file_index, at);
        continue;
      }
      items_.back().segments.push_back({index, offset, at, size});
      items_.back().end_bytes = at + size;
      offset += size;
    }
  }

  std::vector<ReadItem> Finish() && { return std::move(items_); }

 private:
  bool Continues(int32_t file_index, int64_t at) const {
    return !items_.empty() && items_.back().file_index == file_index && items_.back().end_bytes == at;
  }

  void StartItem(int32_t file_index, int64_t at) {
    items_.push_back({.file_index = file_index, .begin_bytes = at, .end_bytes = at, .segments = {}});
    limit_ = at / kDirectAlignmentBytes * kDirectAlignmentBytes + chunk_bytes_;
  }

  // How much of `left_bytes` at `at` fits the current item, cut between words unless it is all.
  int64_t SizeThatFits(int64_t at, int64_t left_bytes) const {
    const int64_t room = limit_ - at;
    return left_bytes <= room ? left_bytes : room / kDigestWordBytes * kDigestWordBytes;
  }

  const int64_t chunk_bytes_;
  int64_t limit_ = 0;  // where the current item must end
  std::vector<ReadItem> items_;
};

}  // namespace

std::vector<ReadItem> PlanReads(const ShardPlan& plan, int64_t chunk_bytes) {
  ItemBuilder builder(chunk_bytes);
  for (const int32_t index : TensorsToRead(plan)) builder.AddTensor(index, plan.tensors[static_cast<size_t>(index)]);
  return std::move(builder).Finish();
}

}  // namespace weightbroker
