#include "common/plan/shard_planner.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"
#include "common/plan/split.h"
#include "common/quant/convert.h"
#include "common/quant/gate.h"

namespace weightbroker {
namespace {

constexpr char kLayers[] = "layers";
constexpr char kMtpLayers[] = "mtp_layers";
constexpr char kExperts[] = "experts";

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

std::string TypeText(const CheckpointTensor& tensor) {
  return absl::StrCat(ToAbsl(tensor.dtype->name), " [", absl::StrJoin(tensor.shape, ", "), "]");
}

// Which dimension is split. Of a bias, there is one only.
int AxisOf(const TensorRole& role, size_t rank) {
  const TensorRule& rule = *role.rule;
  if (rule.axis >= 0) return rule.axis;
  return rule.split == Split::kRow && rank >= 2 ? static_cast<int>(rank) - 1 : 0;
}

// A bias that goes with a weight split by rows is added once, by whoever has the sum.
bool IsWhole(const TensorRole& role) {
  return role.rule->split == Split::kReplicated ||
         (role.rule->split == Split::kRow && role.parameter == Parameter::kBias);
}

absl::Status Mismatch(const std::string& tensor, const std::string& text) {
  return MakeError(Reason::kArchitectureMismatch, absl::StrCat("tensor ", Quote(tensor), " ", text),
                   {{"tensor", Printable(tensor)}});
}

}  // namespace

ShardPlanner::ShardPlanner(const PlanRequest& request, const Architecture& architecture)
    : request_(request),
      architecture_(architecture),
      numbers_(request.checkpoint.config, architecture.sections),
      unquantized_({request.spec.unquantized_modules().begin(), request.spec.unquantized_modules().end()}),
      dtype_(request.spec.dtype() == kSpecAuto ? nullptr : FindDtype(request.spec.dtype())) {}

const CheckpointTensor& ShardPlanner::TensorOf(const TensorRole& role) const {
  return request_.checkpoint.tensors[static_cast<size_t>(role.tensor)];
}

absl::Status ShardPlanner::Prepare() {
  for (const auto& [name, alternatives] : architecture_.numbers) numbers_.Define(name, alternatives);
  RETURN_IF_ERROR(CheckArchitectureAllows());
  ASSIGN_OR_RETURN(roles_, FindTensorRoles(request_.checkpoint, architecture_));
  const auto has = [&](auto predicate) { return std::any_of(roles_.begin(), roles_.end(), predicate); };
  if (has([](const TensorRole& role) { return role.layer >= 0; })) {
    ASSIGN_OR_RETURN(layer_count_, numbers_.Evaluate(kLayers));
    mtp_layer_count_ = numbers_.Evaluate(kMtpLayers).value_or(0);
  }
  if (has([](const TensorRole& role) { return role.rule->is_expert; })) {
    ASSIGN_OR_RETURN(expert_count_, numbers_.Evaluate(kExperts));
  }
  for (const TensorRole& role : roles_) RETURN_IF_ERROR(CheckLayer(role));
  const auto& spec = request_.spec;
  if (spec.pipeline_parallel_size() > std::max<int64_t>(layer_count_, 1)) {
    return MakeError(
        Reason::kSplitImpossible,
        absl::StrCat(layer_count_, " layers are too few for pipeline_parallel_size ", spec.pipeline_parallel_size()),
        {{"unit", kLayers},
         {"count", absl::StrCat(layer_count_)},
         {"ranks", absl::StrCat(spec.pipeline_parallel_size())}});
  }
  if (spec.expert_parallel_size() > 1 && expert_count_ == 0) {
    return MakeError(Reason::kSplitImpossible,
                     absl::StrCat("the model has no experts for expert_parallel_size ", spec.expert_parallel_size()),
                     {{"unit", kExperts}, {"count", "0"}, {"ranks", absl::StrCat(spec.expert_parallel_size())}});
  }
  if (spec.quantization() == kQuantizeFp8Block &&
      !has([&](const TensorRole& role) { return IsQuantizedOnTheFly(role); })) {
    return MakeError(Reason::kQuantizationUnsupported,
                     absl::StrCat("spec.quantization is ", kQuantizeFp8Block, ", but the model has no weight that ",
                                  Printable(architecture_.label), " says to quantize"),
                     {{"where", "spec.quantization"}, {"method", kQuantizeFp8Block}});
  }
  for (const FusedRule& rule : architecture_.fused) {
    for (size_t i = 0; i < rule.sources.size(); ++i) fused_[rule.sources[i]] = {&rule, i};
  }
  FindTied();
  return absl::OkStatus();
}

absl::Status ShardPlanner::CheckArchitectureAllows() const {
  const std::string name = architecture_.names.front();
  for (const RefusedConfig& refused : architecture_.refused) {
    const nlohmann::json* const value = numbers_.FindKey(refused.key);
    if (value == nullptr || *value != refused.value) continue;
    return MakeError(Reason::kSplitImpossible,
                     absl::StrCat(name, " with ", refused.key, " = ", refused.value.dump(), ": ", refused.because,
                                  "; it is served as it is, at tensor parallel size 1 in layout hf"),
                     {{"architecture", name}, {"key", refused.key}, {"found", refused.value.dump()}});
  }
  const int64_t limit = architecture_.max_tensor_parallel_size;
  const int64_t wanted = request_.spec.tensor_parallel_size();
  if (limit == 0 || wanted <= limit) return absl::OkStatus();
  return MakeError(Reason::kSplitImpossible,
                   absl::StrCat(name, " is split over ", limit, " ranks at most, by ", Printable(architecture_.label),
                                "; tensor_parallel_size is ", wanted),
                   {{"architecture", name}, {"allowed", absl::StrCat(limit)}, {"ranks", absl::StrCat(wanted)}});
}

absl::Status ShardPlanner::CheckLayer(const TensorRole& role) const {
  const std::string& name = TensorOf(role).name;
  if (role.layer >= layer_count_ + mtp_layer_count_) {
    return Mismatch(name,
                    absl::StrCat("is of layer ", role.layer, "; by the config there are ", layer_count_,
                                 mtp_layer_count_ > 0 ? absl::StrCat(" and ", mtp_layer_count_, " for MTP") : ""));
  }
  if (role.expert >= 0 && role.rule->is_expert && role.expert >= expert_count_) {
    return Mismatch(name, absl::StrCat("is of expert ", role.expert, "; by the config there are ", expert_count_));
  }
  return absl::OkStatus();
}

void ShardPlanner::FindTied() {
  tied_to_head_.assign(roles_.size(), false);
  for (const auto& [name, target] : request_.checkpoint.aliases) {
    const TensorRule* const rule = FindRule(architecture_, name);
    if (rule == nullptr || rule->stage != Stage::kLast) continue;
    for (size_t i = 0; i < roles_.size(); ++i) {
      if (TensorOf(roles_[i]).name == target) tied_to_head_[i] = true;
    }
  }
}

bool ShardPlanner::IsOnStage(const TensorRole& role, const Place& stage) const {
  const bool is_last = stage.index == stage.size - 1;
  if (role.layer >= layer_count_) return is_last && request_.spec.mtp_layers() == kKeepMtpLayers;
  if (role.layer >= 0) {
    const LayerRange layers = LayersOf(layer_count_, stage);
    return role.layer >= layers.begin && role.layer < layers.end;
  }
  if (role.rule->stage == Stage::kLast) return is_last;
  if (role.rule->stage != Stage::kFirst || stage.index == 0) return true;
  return is_last && tied_to_head_[static_cast<size_t>(role.tensor)];
}

bool ShardPlanner::IsHeld(const TensorRole& role, const RankPlaces& places) const {
  if (!IsOnStage(role, places.stage)) return false;
  if (role.expert < 0 || !role.rule->is_expert) return true;
  const int64_t each = expert_count_ / places.expert_group.size;
  return role.expert / each == places.expert_group.index;
}

std::vector<std::pair<std::string, std::string>> ShardPlanner::AliasesOn(const Place& stage) const {
  std::vector<std::pair<std::string, std::string>> aliases;
  for (const auto& [name, target] : request_.checkpoint.aliases) {
    const TensorRule* const rule = FindRule(architecture_, name);
    const bool is_there = rule == nullptr || rule->stage == Stage::kEvery ||
                          (rule->stage == Stage::kFirst ? stage.index == 0 : stage.index == stage.size - 1);
    const auto role = std::find_if(roles_.begin(), roles_.end(), [&, &target = target](const TensorRole& other) {
      return TensorOf(other).name == target;
    });
    if (is_there && (role == roles_.end() || IsOnStage(*role, stage))) aliases.emplace_back(name, target);
  }
  return aliases;
}

bool ShardPlanner::IsQuantizedOnTheFly(const TensorRole& role) const {
  const CheckpointTensor& tensor = TensorOf(role);
  return request_.spec.quantization() == kQuantizeFp8Block && role.rule->quantize &&
         role.parameter == Parameter::kWeight && tensor.shape.size() == 2 && IsConvertible(*tensor.dtype) &&
         !unquantized_.Covers(tensor.name);
}

bool ShardPlanner::IsFp8(const TensorRole& role) const {
  return role.parameter != Parameter::kScale && role.partner >= 0;
}

const FusedRule* ShardPlanner::FusedRuleFor(const TensorRole& role, size_t& position) const {
  if (request_.spec.layout() != kFusedLayout) return nullptr;
  const auto it = fused_.find(role.key);
  if (it == fused_.end()) return nullptr;
  position = it->second.second;
  return it->second.first;
}

absl::Status ShardPlanner::CheckBlocks(const TensorRole& role, const Region& region, const Place& place) const {
  size_t position = 0;
  const FusedRule* const fused = FusedRuleFor(role, position);
  const bool is_part = role.rule->split == Split::kColumn && request_.spec.layout() == kFusedLayout &&
                       ((fused != nullptr && fused->sources.size() > 1) || role.rule->parts.size() > 1);
  const int64_t length = region.shape[static_cast<size_t>(region.axis)];
  return CheckBlocksAreWhole(region.cut, is_part, length, place, TensorOf(role).name);
}

bool ShardPlanner::IsUncut(const TensorRole& role) const {
  if (IsWhole(role)) return true;
  // Only who splits a vocabulary, or gives it to an engine in its own layout, fills it up.
  const auto& spec = request_.spec;
  return role.rule->split == Split::kVocab && spec.tensor_parallel_size() == 1 && spec.layout() == kHfLayout;
}

absl::StatusOr<ShardPlanner::Part> ShardPlanner::Cut(const TensorRole& role, const RankPlaces& places) const {
  const CheckpointTensor& tensor = TensorOf(role);
  const Place& place = role.rule->is_expert ? places.expert_part : places.tensor;
  Part part{.role = &role, .region = {}, .quantize = IsQuantizedOnTheFly(role)};
  Region& region = part.region;
  region.source = role.tensor;
  region.shape = tensor.shape;
  const bool is_scale = role.parameter == Parameter::kScale && role.partner >= 0;
  // Scales are cut as their weight is, and may be stored without dimensions of 1, or flat.
  if (is_scale) region.shape = request_.checkpoint.tensors[static_cast<size_t>(role.partner)].shape;
  region.axis = IsUncut(role) ? 0 : AxisOf(role, region.shape.size());
  if (static_cast<size_t>(region.axis) >= std::max<size_t>(region.shape.size(), 1)) {
    return Mismatch(tensor.name, absl::StrCat("is ", TypeText(tensor), "; what is split is its dimension ", region.axis,
                                              ", counted from 0"));
  }
  const int64_t length = region.shape.empty() ? 1 : region.shape[static_cast<size_t>(region.axis)];
  if (IsUncut(role)) {
    region.cut = WholeAxis(length);
  } else {
    ASSIGN_OR_RETURN(region.cut, SliceAxis(*role.rule, place, length, numbers_, tensor.name));
  }
  if (role.rule->stacked) {
    if (region.shape.size() < 2 || region.shape[0] != expert_count_) {
      return Mismatch(tensor.name, absl::StrCat("is ", TypeText(tensor), "; its first dimension is to be the ",
                                                expert_count_, " experts"));
    }
    region.is_stack = true;
    ASSIGN_OR_RETURN(region.stack, ExpertsOf(expert_count_, places.expert_group));
    if (region.axis == 0) {  // what is whole, but for the experts
      region.axis = 1;
      region.cut = WholeAxis(region.shape[1]);
    }
  }
  if (!is_scale && (IsFp8(role) || part.quantize)) RETURN_IF_ERROR(CheckBlocks(role, region, place));
  MergeNeighbours(region.cut);
  if (is_scale) ToScales(region);
  return part;
}

void ShardPlanner::ToScales(Region& region) {
  const size_t rank = region.shape.size();
  for (size_t i = rank - 2; i < rank; ++i) {
    if (i == static_cast<size_t>(region.axis)) region.cut = ToBlocks(region.cut);
    region.shape[i] = CeilDiv(region.shape[i], kFp8BlockSize[0]);
  }
}

void ShardPlanner::Finish(const Part& part, ShardTensor tensor, std::vector<ShardTensor>& tensors) const {
  const CheckpointTensor& source = TensorOf(*part.role);
  tensor.dtype = source.dtype;
  if (part.quantize) {
    tensor.dtype = FindDtype(v1::DATA_TYPE_F8_E4M3);
    tensor.transform = Transform::kQuantizeFp8Block;
    tensor.scale_name = absl::StrCat(tensor.name, kScaleSuffix);
    ShardTensor& scales = tensors.emplace_back();
    scales.name = tensor.scale_name;
    scales.dtype = FindDtype(v1::DATA_TYPE_F32);
    scales.shape = tensor.shape;
    for (size_t i = scales.shape.size() - 2; i < scales.shape.size(); ++i) {
      scales.shape[i] = CeilDiv(scales.shape[i], kFp8BlockSize[0]);
    }
    scales.first_source = tensor.first_source;
    scales.is_scale = true;
  } else if (dtype_ != nullptr && dtype_ != source.dtype && IsConvertible(*source.dtype) &&
             part.role->parameter != Parameter::kScale && !part.role->rule->keep_dtype) {
    tensor.dtype = dtype_;
    if (tensor.transform == Transform::kCopy) tensor.transform = Transform::kConvert;
  }
  tensors.push_back(std::move(tensor));
}

void ShardPlanner::AddAsItIs(const Part& part, std::vector<ShardTensor>& tensors) const {
  ShardTensor tensor;
  tensor.name = TensorOf(*part.role).name;
  tensor.shape = part.region.ResultShape();
  tensor.first_source = part.role->tensor;
  if (part.quantize) {
    AppendQuantized(part.region, 0, 0, tensor.pieces);
  } else {
    AppendCopy(part.region, 0, tensor.pieces);
  }
  Finish(part, std::move(tensor), tensors);
}

absl::Status ShardPlanner::CheckComplete(const std::string& name, const FusedGroup& group,
                                         const RankPlaces& places) const {
  const int64_t experts = group.rule->stacks_experts ? expert_count_ / places.expert_group.size : 1;
  const int64_t first_expert = group.rule->stacks_experts ? experts * places.expert_group.index : 0;
  for (int64_t expert = first_expert; expert < first_expert + experts; ++expert) {
    for (size_t i = 0; i < group.rule->sources.size(); ++i) {
      if (group.parts.count({expert, i}) != 0) continue;
      return Mismatch(name, absl::StrCat("is made of ", absl::StrJoin(group.rule->sources, ", "),
                                         ", of which the checkpoint lacks ", group.rule->sources[i],
                                         group.rule->stacks_experts ? absl::StrCat(" of expert ", expert) : ""));
    }
  }
  return absl::OkStatus();
}

absl::Status ShardPlanner::CheckAlike(const std::string& name, const Part& first, const Part& other) const {
  const CheckpointTensor& a = TensorOf(*first.role);
  const CheckpointTensor& b = TensorOf(*other.role);
  const auto tail = [](const Region& region) {
    const auto shape = region.ResultShape();
    return std::vector<int64_t>(shape.begin() + (shape.empty() ? 0 : 1), shape.end());
  };
  if (a.dtype == b.dtype && first.quantize == other.quantize && tail(first.region) == tail(other.region)) {
    return absl::OkStatus();
  }
  const auto text = [&](const CheckpointTensor& tensor, const Part& part) {
    return absl::StrCat(Quote(tensor.name), " (", TypeText(tensor), part.quantize ? ", to be quantized" : "", ")");
  };
  return MakeError(Reason::kSplitImpossible,
                   absl::StrCat("tensor ", Quote(name), " would be made of ", text(a, first), " and ", text(b, other),
                                ", which differ in type or columns"),
                   {{"tensor", Printable(name)}, {"first", Printable(a.name)}, {"second", Printable(b.name)}});
}

absl::Status ShardPlanner::AddFused(const std::string& name, const FusedGroup& group, const RankPlaces& places,
                                    std::vector<ShardTensor>& tensors) const {
  RETURN_IF_ERROR(CheckComplete(name, group, places));
  const Part& first = group.parts.begin()->second;
  ShardTensor tensor;
  tensor.name = name;
  tensor.first_source = first.role->tensor;
  std::vector<int64_t> shape = first.region.ResultShape();  // of one expert's
  shape[0] = 0;
  for (const auto& [key, part] : group.parts) {
    RETURN_IF_ERROR(CheckAlike(name, first, part));
    if (key.first == group.parts.begin()->first.first) shape[0] += part.region.ResultShape()[0];
    if (LiesBefore(part, tensor.first_source)) tensor.first_source = part.role->tensor;
  }
  std::vector<int64_t> scale_shape = shape;
  for (int64_t& dimension : scale_shape) dimension = CeilDiv(dimension, kFp8BlockSize[0]);
  int64_t offset = 0;
  int64_t scale_offset = 0;
  const bool is_zero =
      group.rule->first_rank_only && (first.role->rule->is_expert ? places.expert_part : places.tensor).index != 0;
  for (const auto& [key, part] : group.parts) {
    const auto part_shape = part.region.ResultShape();
    if (is_zero) continue;
    if (part.quantize) {
      AppendQuantized(part.region, offset, scale_offset, tensor.pieces);
      scale_offset += CeilDiv(part_shape[0], kFp8BlockSize[0]) * scale_shape[1];
    } else if (group.rule->transpose) {
      AppendTransposed(part.region, offset, tensor.pieces);
    } else {
      AppendCopy(part.region, offset, tensor.pieces);
    }
    offset += ElementCount(part_shape);
  }
  if (group.rule->transpose) {
    tensor.transform = Transform::kTranspose;
    std::swap(shape[1], shape[2]);
  }
  if (group.rule->stacks_experts) {
    shape.insert(shape.begin(), expert_count_ / places.expert_group.size);
  }
  tensor.shape = std::move(shape);
  Finish(first, std::move(tensor), tensors);
  return absl::OkStatus();
}

bool ShardPlanner::LiesBefore(const Part& part, int32_t source) const {
  const CheckpointTensor& a = TensorOf(*part.role);
  const CheckpointTensor& b = request_.checkpoint.tensors[static_cast<size_t>(source)];
  return std::make_pair(a.file_index, a.offset_bytes) < std::make_pair(b.file_index, b.offset_bytes);
}

absl::StatusOr<ShardPlan> ShardPlanner::Plan(int32_t rank) const {
  const RankPlaces places = PlacesOf(request_.spec, rank);
  if (expert_count_ > 0) RETURN_IF_ERROR(ExpertsOf(expert_count_, places.expert_group).status());
  std::vector<ShardTensor> tensors;
  std::map<std::string, FusedGroup> groups;
  for (const TensorRole& role : roles_) {
    if (!IsHeld(role, places)) continue;
    ASSIGN_OR_RETURN(Part part, Cut(role, places));
    size_t position = 0;
    const FusedRule* const rule = FusedRuleFor(role, position);
    if (rule == nullptr) {
      AddAsItIs(part, tensors);
      continue;
    }
    if (rule->transpose && part.region.shape.size() != 3) {
      return Mismatch(TensorOf(role).name,
                      absl::StrCat("is ", TypeText(TensorOf(role)), "; it is to have 3 dimensions"));
    }
    FusedGroup& group = groups[NameFused(rule->name, role)];
    group.rule = rule;
    group.parts.emplace(std::make_pair(rule->stacks_experts ? role.expert : 0, position), std::move(part));
  }
  for (const auto& [name, group] : groups) RETURN_IF_ERROR(AddFused(name, group, places, tensors));
  return AssembleShard(request_.checkpoint, rank, std::move(tensors), AliasesOn(places.stage), request_.max_slabs);
}

}  // namespace weightbroker
