#include "common/plan/shard_assembly.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

// Rounded up to where the next tensor may start; nothing if offsets would no longer fit 63 bits.
std::optional<int64_t> EndOf(int64_t place, int64_t size_bytes) {
  if (size_bytes > std::numeric_limits<int64_t>::max() - kTensorAlignmentBytes - place) return std::nullopt;
  return (place + size_bytes + kTensorAlignmentBytes - 1) / kTensorAlignmentBytes * kTensorAlignmentBytes;
}

// Gives out aligned places, one after the other, in slabs of about `slab_bytes`.
class SlabCursor {
 public:
  explicit SlabCursor(int64_t slab_bytes) : slab_bytes_(slab_bytes) {}

  struct Place {
    int32_t slab = 0;
    int64_t offset_bytes = 0;
  };
  Place Take(int64_t size_bytes) {
    if (size_bytes > 0 && ends_.back() >= slab_bytes_) ends_.push_back(0);
    const Place place{static_cast<int32_t>(ends_.size() - 1), ends_.back()};
    ends_.back() = *EndOf(place.offset_bytes, size_bytes);
    return place;
  }

  // How long the slabs must be. One whose tensors are all empty is there too, so that every tensor is in one.
  std::vector<int64_t> slab_bytes() && {
    for (int64_t& end : ends_) end = std::max(end, kTensorAlignmentBytes);
    return std::move(ends_);
  }

 private:
  const int64_t slab_bytes_;
  std::vector<int64_t> ends_ = {0};
};

absl::Status TooLarge(const std::string& tensor) {
  return MakeError(Reason::kCheckpointTooLarge,
                   absl::StrCat("tensor ", Quote(tensor), ": with it the shard exceeds 2^63 bytes"),
                   {{"tensor", Printable(tensor)}});
}

// nullopt if it does not fit 63 bits.
std::optional<int64_t> SizeBytes(const ShardTensor& tensor) {
  int64_t size = tensor.dtype->bits / 8;
  for (const int64_t dimension : tensor.shape) {
    if (dimension == 0) return 0;
    if (size > std::numeric_limits<int64_t>::max() / dimension) return std::nullopt;
    size *= dimension;
  }
  return size;
}

TensorPlacement* Find(ShardPlan& plan, const std::string& name) {
  const auto it =
      std::lower_bound(plan.tensors.begin(), plan.tensors.end(), name,
                       [](const TensorPlacement& tensor, const std::string& key) { return tensor.name < key; });
  return it != plan.tensors.end() && it->name == name ? &*it : nullptr;
}

void SortByName(ShardPlan& plan) {
  std::sort(plan.tensors.begin(), plan.tensors.end(),
            [](const TensorPlacement& a, const TensorPlacement& b) { return a.name < b.name; });
}

absl::Status CheckNamesDiffer(const ShardPlan& plan) {
  const auto twice =
      std::adjacent_find(plan.tensors.begin(), plan.tensors.end(),
                         [](const TensorPlacement& a, const TensorPlacement& b) { return a.name == b.name; });
  if (twice == plan.tensors.end()) return absl::OkStatus();
  return MakeError(Reason::kArchitectureMismatch,
                   absl::StrCat("tensor ", Quote(twice->name),
                                " would be there twice: the architecture file gives two "
                                "tensors the same name"),
                   {{"tensor", Printable(twice->name)}});
}

// Adds a row for each tied weight that shares the memory of one of `plan.tensors`, which are sorted.
absl::Status AddAliases(const std::vector<std::pair<std::string, std::string>>& names, ShardPlan& plan) {
  std::vector<TensorPlacement> aliases;
  for (const auto& [name, target] : names) {
    const TensorPlacement* const found = Find(plan, target);
    if (found == nullptr) {
      return MakeError(Reason::kCheckpointMalformed,
                       absl::StrCat("tensor ", Quote(name), " is tied to ", Quote(target), ", which is not there"),
                       {{"tensor", Printable(name)}, {"alias_of", Printable(target)}});
    }
    TensorPlacement alias = *found;
    alias.name = name;
    alias.alias_of = target;
    alias.pieces.clear();
    aliases.push_back(std::move(alias));
  }
  plan.tensors.insert(plan.tensors.end(), std::make_move_iterator(aliases.begin()),
                      std::make_move_iterator(aliases.end()));
  SortByName(plan);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ShardPlan> AssembleShard(const Checkpoint& checkpoint, int32_t rank, std::vector<ShardTensor> tensors,
                                        const std::vector<std::pair<std::string, std::string>>& aliases,
                                        int max_slabs) {
  const auto place_in_files = [&](const ShardTensor& tensor) {
    const CheckpointTensor& source = checkpoint.tensors[static_cast<size_t>(tensor.first_source)];
    return std::make_tuple(source.file_index, source.offset_bytes, std::string_view(tensor.name));
  };
  std::sort(tensors.begin(), tensors.end(),
            [&](const ShardTensor& a, const ShardTensor& b) { return place_in_files(a) < place_in_files(b); });

  int64_t total_bytes = 0;
  for (const ShardTensor& tensor : tensors) {
    const auto size = SizeBytes(tensor);
    const auto end = size.has_value() ? EndOf(total_bytes, *size) : std::nullopt;
    if (!end.has_value()) return TooLarge(tensor.name);
    total_bytes = *end;
  }

  ShardPlan plan;
  plan.rank = rank;
  SlabCursor cursor(max_slabs == 1 ? total_bytes
                                   : std::max(kLeastSlabBytes, (total_bytes + max_slabs - 1) / max_slabs));
  std::vector<std::pair<std::string, std::string>> scales;  // weight, scale
  for (ShardTensor& tensor : tensors) {
    const int64_t size_bytes = *SizeBytes(tensor);
    const SlabCursor::Place place = cursor.Take(size_bytes);
    if (!tensor.scale_name.empty()) scales.emplace_back(tensor.name, tensor.scale_name);
    plan.tensors.push_back({.name = std::move(tensor.name),
                            .dtype = tensor.dtype,
                            .shape = std::move(tensor.shape),
                            .slab = place.slab,
                            .slab_offset_bytes = place.offset_bytes,
                            .size_bytes = size_bytes,
                            .alias_of = {},
                            .transform = tensor.transform,
                            .pieces = std::move(tensor.pieces),
                            .scale_tensor = -1,
                            .is_scale = tensor.is_scale});
  }
  plan.slab_bytes = std::move(cursor).slab_bytes();
  SortByName(plan);
  RETURN_IF_ERROR(CheckNamesDiffer(plan));
  RETURN_IF_ERROR(AddAliases(aliases, plan));
  for (const auto& [weight, scale] : scales) {
    Find(plan, weight)->scale_tensor = static_cast<int32_t>(Find(plan, scale) - plan.tensors.data());
  }
  return plan;
}

}  // namespace weightbroker
