#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <span>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/plan/engine_layout.h"
#include "common/plan/plan.h"
#include "common/quant/convert.h"
#include "common/quant/module_set.h"

namespace weightbroker {
namespace {

constexpr int64_t kMaxRanks = 1 << 16;
constexpr const char* kQuantizations[] = {kSpecAuto, "none", "fp8", kQuantizeFp8Block};
constexpr const char* kDtypes[] = {kSpecAuto, "BF16", "F16", "F32"};
constexpr const char* kMtpPolicies[] = {kKeepMtpLayers, kDropMtpLayers};
// Of block-wise FP8: the scales are F32 whatever the model's own type is.
constexpr char kScaleSuffix[] = "weight_scale_inv";

absl::Status CheckWord(const std::string& field, const std::string& word, std::span<const char* const> allowed) {
  if (std::find(allowed.begin(), allowed.end(), word) != allowed.end()) return absl::OkStatus();
  const std::string list = absl::StrJoin(allowed, ", ");
  return MakeError(Reason::kInvalidArgument,
                   absl::StrCat("spec.", field, " ", Quote(word), " is not known; one of ", list, " is"),
                   {{"field", absl::StrCat("spec.", field)}, {"found", Printable(word)}, {"allowed", list}});
}

absl::Status InvalidSize(const std::string& field, int64_t found, const std::string& rule) {
  return MakeError(Reason::kInvalidArgument, absl::StrCat("spec.", field, " is ", found, "; it must ", rule),
                   {{"field", absl::StrCat("spec.", field)}, {"found", absl::StrCat(found)}, {"allowed", rule}});
}

absl::Status CheckSizes(const v1::WeightSpec& spec) {
  const std::pair<const char*, int64_t> sizes[] = {{"tensor_parallel_size", spec.tensor_parallel_size()},
                                                   {"pipeline_parallel_size", spec.pipeline_parallel_size()},
                                                   {"expert_parallel_size", spec.expert_parallel_size()},
                                                   {"data_parallel_size", spec.data_parallel_size()}};
  for (const auto& [field, size] : sizes) {
    if (size < 1 || size > kMaxRanks) return InvalidSize(field, size, absl::StrCat("be from 1 to ", kMaxRanks));
  }
  const int64_t in_stage = int64_t{spec.tensor_parallel_size()} * spec.data_parallel_size();
  if (in_stage * spec.pipeline_parallel_size() > kMaxRanks) {
    return InvalidSize("pipeline_parallel_size", spec.pipeline_parallel_size(),
                       absl::StrCat("not make more than ", kMaxRanks, " ranks of all"));
  }
  if (in_stage % spec.expert_parallel_size() != 0) {
    return InvalidSize("expert_parallel_size", spec.expert_parallel_size(),
                       absl::StrCat("divide tensor_parallel_size x data_parallel_size, ", in_stage));
  }
  return absl::OkStatus();
}

absl::Status CheckModules(const v1::WeightSpec& spec) {
  for (const std::string& module : spec.unquantized_modules()) {
    if (ModuleSet::IsPlainName(module)) continue;
    return MakeError(Reason::kInvalidArgument,
                     absl::StrCat("spec.unquantized_modules has ", Quote(module),
                                  "; it must hold plain module names, of letters, digits, '_', '-' and dots between"),
                     {{"field", "spec.unquantized_modules"}, {"found", Printable(module)}});
  }
  if (spec.unquantized_modules().empty() || spec.quantization() == kQuantizeFp8Block) return absl::OkStatus();
  return MakeError(Reason::kInvalidArgument,
                   absl::StrCat("spec.unquantized_modules is for spec.quantization ", kQuantizeFp8Block,
                                "; a quantized checkpoint says itself what it leaves out"),
                   {{"field", "spec.unquantized_modules"}});
}

void SetDefault(int32_t (v1::WeightSpec::*get)() const, void (v1::WeightSpec::*set)(int32_t), v1::WeightSpec& spec) {
  if ((spec.*get)() == 0) (spec.*set)(1);
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
  if (wanted == kSpecAuto || wanted == found || (wanted == kQuantizeFp8Block && found == "none")) {
    return absl::OkStatus();
  }
  return MakeError(Reason::kQuantizationContradicted,
                   absl::StrCat("spec.quantization is ", wanted, ", but the checkpoint's is ", found,
                                ": ask for that, or leave the field empty"),
                   {{"field", "spec.quantization"}, {"requested", wanted}, {"found", found}});
}

absl::Status CheckDtypeWord(const std::string& wanted, const Checkpoint& checkpoint) {
  const DtypeInfo* const found = MainFloatDtype(checkpoint);
  if (wanted == kSpecAuto || found == nullptr || IsConvertible(*found)) return absl::OkStatus();
  const std::string name(found->name);
  return MakeError(Reason::kDtypeMismatch,
                   absl::StrCat("spec.dtype is ", wanted, ", but the checkpoint's weights are ", name,
                                ", which is not converted: leave the field empty"),
                   {{"field", "spec.dtype"}, {"requested", wanted}, {"found", name}});
}

absl::Status CheckModulesAreThere(const v1::WeightSpec& spec, const Checkpoint& checkpoint) {
  if (spec.unquantized_modules().empty()) return absl::OkStatus();
  std::vector<std::string_view> tensors;
  for (const CheckpointTensor& tensor : checkpoint.tensors) tensors.push_back(tensor.name);
  for (const auto& [alias, target] : checkpoint.aliases) tensors.push_back(alias);
  const std::vector<std::string> unused =
      ModuleSet::Unused({spec.unquantized_modules().begin(), spec.unquantized_modules().end()}, tensors);
  if (unused.empty()) return absl::OkStatus();
  return MakeError(Reason::kInvalidArgument,
                   absl::StrCat("spec.unquantized_modules has ", Quote(unused.front()),
                                ", and no tensor of the checkpoint is in a module of that name: is it misspelt?"),
                   {{"field", "spec.unquantized_modules"}, {"found", Printable(unused.front())}});
}

}  // namespace

absl::StatusOr<v1::WeightSpec> CompleteSpec(const v1::WeightSpec& spec) {
  using Spec = v1::WeightSpec;
  Spec complete = spec;
  SetDefault(&Spec::tensor_parallel_size, &Spec::set_tensor_parallel_size, complete);
  SetDefault(&Spec::pipeline_parallel_size, &Spec::set_pipeline_parallel_size, complete);
  SetDefault(&Spec::expert_parallel_size, &Spec::set_expert_parallel_size, complete);
  SetDefault(&Spec::data_parallel_size, &Spec::set_data_parallel_size, complete);
  if (complete.quantization().empty()) complete.set_quantization(kSpecAuto);
  if (complete.dtype().empty()) complete.set_dtype(kSpecAuto);
  if (complete.layout().empty()) complete.set_layout(kHfLayout);
  if (complete.mtp_layers().empty()) complete.set_mtp_layers(kKeepMtpLayers);
  auto& modules = *complete.mutable_unquantized_modules();
  std::sort(modules.begin(), modules.end());
  modules.erase(std::unique(modules.begin(), modules.end()), modules.end());
  RETURN_IF_ERROR(CheckSizes(complete));
  RETURN_IF_ERROR(CheckWord("dtype", complete.dtype(), kDtypes));
  RETURN_IF_ERROR(CheckWord("mtp_layers", complete.mtp_layers(), kMtpPolicies));
  RETURN_IF_ERROR(CheckModules(complete));
  RETURN_IF_ERROR(CheckEngineFields(complete));
  if (IsEngineLayout(complete)) {
    RETURN_IF_ERROR(CheckEngineQuantization(complete));
    return complete;
  }
  RETURN_IF_ERROR(CheckWord("quantization", complete.quantization(), kQuantizations));
  if (complete.layout() != kHfLayout && complete.layout() != kFusedLayout) {
    return MakeError(Reason::kLayoutUnsupported,
                     absl::StrCat("spec.layout ", Quote(complete.layout()), " is not supported; these are: ", kHfLayout,
                                  ", the checkpoint's own names, and ", kFusedLayout,
                                  ", those of fused projections and stacked experts"),
                     {{"field", "spec.layout"},
                      {"found", Printable(complete.layout())},
                      {"allowed", absl::StrCat(kHfLayout, ", ", kFusedLayout)}});
  }
  return complete;
}

int32_t WorldSize(const v1::WeightSpec& spec) {
  // What is 0 was completed by an older version, which knew only the last.
  const auto size = [](int32_t value) { return std::max(1, value); };
  return size(spec.pipeline_parallel_size()) * size(spec.data_parallel_size()) * size(spec.tensor_parallel_size());
}

std::vector<int32_t> AllRanks(const v1::WeightSpec& spec) {
  std::vector<int32_t> ranks(static_cast<size_t>(WorldSize(spec)));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

absl::Status CheckSpecAgainstCheckpoint(const v1::WeightSpec& spec, const Checkpoint& checkpoint,
                                        const std::string& quantization_method) {
  RETURN_IF_ERROR(CheckQuantizationWord(spec.quantization(), quantization_method));
  RETURN_IF_ERROR(CheckModulesAreThere(spec, checkpoint));
  return CheckDtypeWord(spec.dtype(), checkpoint);
}

}  // namespace weightbroker
