#include "common/plan/plan.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/quote.h"

namespace weightbroker {
namespace {

constexpr const char* kQuantizations[] = {kSpecAuto, "none", "fp8"};
constexpr const char* kDtypes[] = {kSpecAuto, "BF16", "F16", "F32"};
constexpr char kHfLayout[] = "hf";
// Of block-wise FP8: the scales are F32 whatever the model's own type is.
constexpr char kScaleSuffix[] = "weight_scale_inv";

absl::Status CheckWord(const std::string& field, const std::string& word, std::span<const char* const> allowed) {
  if (std::find(allowed.begin(), allowed.end(), word) != allowed.end()) return absl::OkStatus();
  const std::string list = absl::StrJoin(allowed, ", ");
  return MakeError(Reason::kInvalidArgument,
                   absl::StrCat("spec.", field, " ", Quote(word), " is not known; one of ", list, " is"),
                   {{"field", absl::StrCat("spec.", field)}, {"found", Printable(word)}, {"allowed", list}});
}

absl::Status CheckParallelism(int32_t tensor_parallel_size) {
  const std::map<std::string, std::string> metadata = {
      {"field", "spec.tensor_parallel_size"}, {"found", absl::StrCat(tensor_parallel_size)}, {"allowed", "1"}};
  if (tensor_parallel_size < 1) {
    return MakeError(Reason::kInvalidArgument,
                     absl::StrCat("spec.tensor_parallel_size is ", tensor_parallel_size, "; it must be 1 or more"),
                     metadata);
  }
  if (tensor_parallel_size > 1) {
    return MakeError(Reason::kParallelismUnsupported,
                     absl::StrCat("spec.tensor_parallel_size is ", tensor_parallel_size,
                                  ", and this version serves 1 only: it does not split weights over ranks"),
                     metadata);
  }
  return absl::OkStatus();
}

bool IsUnquantizedFloat(const CheckpointTensor& tensor) {
  const auto proto = tensor.dtype->proto;
  return (proto == v1::DATA_TYPE_F16 || proto == v1::DATA_TYPE_BF16 || proto == v1::DATA_TYPE_F32 ||
          proto == v1::DATA_TYPE_F64) &&
         !absl::EndsWith(tensor.name, kScaleSuffix);
}

// The floating-point type that most of the checkpoint's unquantized bytes have: a model has one, and keeps a few small
// tensors in another. Null if it has no such tensor.
const DtypeInfo* MainFloatDtype(const Checkpoint& checkpoint) {
  std::map<const DtypeInfo*, int64_t> bytes;
  for (const CheckpointTensor& tensor : checkpoint.tensors) {
    if (IsUnquantizedFloat(tensor)) bytes[tensor.dtype] += tensor.size_bytes;
  }
  const auto most =
      std::max_element(bytes.begin(), bytes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == bytes.end() ? nullptr : most->first;
}

absl::Status CheckQuantizationWord(const std::string& wanted, const std::string& found) {
  if (wanted == kSpecAuto || wanted == found) return absl::OkStatus();
  return MakeError(Reason::kQuantizationContradicted,
                   absl::StrCat("spec.quantization is ", wanted, ", but the checkpoint's is ", found,
                                ": ask for that, or leave the field empty"),
                   {{"field", "spec.quantization"}, {"requested", wanted}, {"found", found}});
}

absl::Status CheckDtypeWord(const std::string& wanted, const Checkpoint& checkpoint) {
  const DtypeInfo* const found = MainFloatDtype(checkpoint);
  if (wanted == kSpecAuto || found == nullptr || found->name == wanted) return absl::OkStatus();
  const std::string name(found->name);
  return MakeError(Reason::kDtypeMismatch,
                   absl::StrCat("spec.dtype is ", wanted, ", but the checkpoint's weights are ", name,
                                ", and this version does not convert them: ask for that, or leave the field empty"),
                   {{"field", "spec.dtype"}, {"requested", wanted}, {"found", name}});
}

// Gives out aligned places, one after the other.
class SlabCursor {
 public:
  // The place of the next tensor, or nothing if offsets would no longer fit 63 bits.
  std::optional<int64_t> Take(int64_t size_bytes) {
    const int64_t place = end_;
    if (size_bytes > std::numeric_limits<int64_t>::max() - kTensorAlignmentBytes - place) return std::nullopt;
    end_ = (place + size_bytes + kTensorAlignmentBytes - 1) / kTensorAlignmentBytes * kTensorAlignmentBytes;
    return place;
  }
  int64_t end() const { return end_; }

 private:
  int64_t end_ = 0;
};

TensorPlacement PlaceAt(const CheckpointTensor& tensor, int64_t slab_offset_bytes) {
  TensorPlacement placement;
  placement.name = tensor.name;
  placement.dtype = tensor.dtype;
  placement.shape = tensor.shape;
  placement.slab_offset_bytes = slab_offset_bytes;
  placement.size_bytes = tensor.size_bytes;
  placement.file_index = tensor.file_index;
  placement.file_offset_bytes = tensor.offset_bytes;
  return placement;
}

absl::Status TooLarge(const CheckpointTensor& tensor) {
  return MakeError(Reason::kCheckpointTooLarge,
                   absl::StrCat("tensor ", Quote(tensor.name), ": with it the shard exceeds 2^63 bytes"),
                   {{"tensor", Printable(tensor.name)}});
}

absl::Status RankOutOfRange(int32_t rank) {
  return MakeError(Reason::kRankOutOfRange, absl::StrCat("rank ", rank, " does not exist: with 1 rank there is only 0"),
                   {{"found", absl::StrCat(rank)}, {"allowed", "0"}});
}

bool NameLess(const TensorPlacement& a, const TensorPlacement& b) { return a.name < b.name; }

// Adds a row for each tied weight that shares the memory of one of `plan.tensors`, which are sorted.
absl::Status AddAliases(const Checkpoint& checkpoint, ShardPlan& plan) {
  std::vector<TensorPlacement> aliases;
  for (const auto& [name, target] : checkpoint.aliases) {
    const auto found =
        std::lower_bound(plan.tensors.begin(), plan.tensors.end(), target,
                         [](const TensorPlacement& tensor, const std::string& key) { return tensor.name < key; });
    if (found == plan.tensors.end() || found->name != target) {
      return MakeError(Reason::kCheckpointMalformed,
                       absl::StrCat("tensor ", Quote(name), " is tied to ", Quote(target), ", which is not there"),
                       {{"tensor", Printable(name)}, {"alias_of", Printable(target)}});
    }
    TensorPlacement alias = *found;
    alias.name = name;
    alias.alias_of = target;
    aliases.push_back(std::move(alias));
  }
  plan.tensors.insert(plan.tensors.end(), std::make_move_iterator(aliases.begin()),
                      std::make_move_iterator(aliases.end()));
  std::sort(plan.tensors.begin(), plan.tensors.end(), NameLess);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::WeightSpec> CompleteSpec(const v1::WeightSpec& spec) {
  v1::WeightSpec complete = spec;
  if (complete.tensor_parallel_size() == 0) complete.set_tensor_parallel_size(1);
  if (complete.quantization().empty()) complete.set_quantization(kSpecAuto);
  if (complete.dtype().empty()) complete.set_dtype(kSpecAuto);
  if (complete.layout().empty()) complete.set_layout(kHfLayout);
  RETURN_IF_ERROR(CheckParallelism(complete.tensor_parallel_size()));
  RETURN_IF_ERROR(CheckWord("quantization", complete.quantization(), kQuantizations));
  RETURN_IF_ERROR(CheckWord("dtype", complete.dtype(), kDtypes));
  if (complete.layout() != kHfLayout) {
    return MakeError(Reason::kLayoutUnsupported,
                     absl::StrCat("spec.layout ", Quote(complete.layout()), " is not supported: this version serves ",
                                  kHfLayout, ", the checkpoint's own names and order"),
                     {{"field", "spec.layout"}, {"found", Printable(complete.layout())}, {"allowed", kHfLayout}});
  }
  return complete;
}

absl::Status CheckSpecAgainstCheckpoint(const v1::WeightSpec& spec, const Checkpoint& checkpoint,
                                        const std::string& quantization_method) {
  RETURN_IF_ERROR(CheckQuantizationWord(spec.quantization(), quantization_method));
  return CheckDtypeWord(spec.dtype(), checkpoint);
}

int32_t WorldSize(const v1::WeightSpec& spec) { return std::max(1, spec.tensor_parallel_size()); }

absl::StatusOr<ShardPlan> PlanShard(const Checkpoint& checkpoint, int32_t rank) {
  if (rank != 0) return RankOutOfRange(rank);
  std::vector<const CheckpointTensor*> in_file_order;
  for (const CheckpointTensor& tensor : checkpoint.tensors) in_file_order.push_back(&tensor);
  std::sort(in_file_order.begin(), in_file_order.end(), [](const CheckpointTensor* a, const CheckpointTensor* b) {
    return std::tie(a->file_index, a->offset_bytes, a->name) < std::tie(b->file_index, b->offset_bytes, b->name);
  });

  ShardPlan plan;
  SlabCursor cursor;
  for (const CheckpointTensor* tensor : in_file_order) {
    const auto place = cursor.Take(tensor->size_bytes);
    if (!place.has_value()) return TooLarge(*tensor);
    plan.tensors.push_back(PlaceAt(*tensor, *place));
    plan.read_bytes += tensor->size_bytes;
  }
  // A shard whose tensors are all empty still has a slab, so that every tensor is in one.
  plan.slab_bytes = {std::max(cursor.end(), kTensorAlignmentBytes)};
  std::sort(plan.tensors.begin(), plan.tensors.end(), NameLess);
  RETURN_IF_ERROR(AddAliases(checkpoint, plan));
  return plan;
}

}  // namespace weightbroker
