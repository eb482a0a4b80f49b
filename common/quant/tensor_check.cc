#include "common/quant/tensor_check.h"

#include <algorithm>
#include <cctype>
#include <string_view>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"
#include "common/quant/module_set.h"

namespace weightbroker {
namespace {

constexpr char kScaleSuffix[] = "_scale_inv";

// Ends of tensor names that only another method writes.
struct ForeignSuffix {
  const char* suffix;
  const char* method;
};
constexpr ForeignSuffix kForeignSuffixes[] = {
    {".qweight", "gptq or awq"},
    {".qzeros", "gptq or awq"},
    {".g_idx", "gptq"},
    {".weight_packed", "compressed-tensors"},
    {".weight_shape", "compressed-tensors"},
    {".weight_zero_point", "compressed-tensors"},
    {".weight_global_scale", "compressed-tensors"},
    {".input_global_scale", "compressed-tensors"},
    {".weight_scale", "compressed-tensors, modelopt or per-tensor fp8"},
    {".weight_scale_2", "modelopt"},
    {".input_scale", "a method with static activation scales"},
    {".activation_scale", "a method with static activation scales"},
    {".input_scale_inv", "a method with static activation scales"},
    {".SCB", "bitsandbytes"},
    {".weight.absmax", "bitsandbytes"},
    {".weight.quant_map", "bitsandbytes"},
    {".weight.quant_state.bitsandbytes__nf4", "bitsandbytes"},
    {".weight.quant_state.bitsandbytes__fp4", "bitsandbytes"},
    {".W_q", "hqq"},
    {"_proj_blocks", "mxfp4"},
    {"_proj_scales", "mxfp4"},
};

// Types that hold packed codes, not numbers, where a tensor is called a weight.
constexpr v1::DataType kPackedTypes[] = {v1::DATA_TYPE_U8,  v1::DATA_TYPE_I8,  v1::DATA_TYPE_U16, v1::DATA_TYPE_I16,
                                         v1::DATA_TYPE_U32, v1::DATA_TYPE_I32, v1::DATA_TYPE_U64, v1::DATA_TYPE_I64};
constexpr v1::DataType kScaleTypes[] = {v1::DATA_TYPE_F32, v1::DATA_TYPE_BF16, v1::DATA_TYPE_F16};

template <size_t N>
bool IsOneOf(const v1::DataType (&types)[N], v1::DataType type) {
  return std::find(std::begin(types), std::end(types), type) != std::end(types);
}

bool IsFp8(const CheckpointTensor& tensor) { return tensor.dtype->proto == v1::DATA_TYPE_F8_E4M3; }

std::string TypeText(const CheckpointTensor& tensor) {
  return absl::StrCat(ToAbsl(tensor.dtype->name), " [", absl::StrJoin(tensor.shape, ", "), "]");
}

// "model.layers.*.mlp.up_proj.weight": what tensors of different layers and experts have in common.
std::string Role(std::string_view name) {
  std::string role;
  while (!name.empty()) {
    const size_t dot = std::min(name.find('.'), name.size());
    const std::string_view part = name.substr(0, dot);
    const bool is_number = std::all_of(part.begin(), part.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
    absl::StrAppend(&role, role.empty() ? "" : ".", is_number ? "*" : ToAbsl(part));
    name.remove_prefix(std::min(dot + 1, name.size()));
  }
  return role;
}

class TensorCheck {
 public:
  TensorCheck(const Checkpoint& checkpoint, const Quantization& quantization)
      : checkpoint_(checkpoint), quantization_(quantization), ignored_(quantization.ignored_modules) {}

  absl::Status Run() const {
    for (const CheckpointTensor& tensor : checkpoint_.tensors) {
      RETURN_IF_ERROR(CheckDtype(FileOf(tensor), tensor.name, *tensor.dtype));
      RETURN_IF_ERROR(IsNotForeign(tensor));
    }
    return quantization_.method == "fp8" ? CheckBlockFp8() : CheckUnquantized();
  }

 private:
  const std::string& FileOf(const CheckpointTensor& tensor) const {
    return checkpoint_.files.shard_names[static_cast<size_t>(tensor.file_index)];
  }

  const CheckpointTensor* Find(const std::string& name) const {
    const auto& tensors = checkpoint_.tensors;
    const auto it =
        std::lower_bound(tensors.begin(), tensors.end(), name,
                         [](const CheckpointTensor& tensor, const std::string& key) { return tensor.name < key; });
    return it != tensors.end() && it->name == name ? &*it : nullptr;
  }

  absl::Status Contradicted(const CheckpointTensor& tensor, const std::string& text) const {
    return MakeError(
        Reason::kQuantizationContradicted,
        absl::StrCat(Printable(FileOf(tensor)), ": tensor ", Quote(tensor.name), " (", TypeText(tensor), ") ", text),
        {{"file", Printable(FileOf(tensor))},
         {"tensor", Printable(tensor.name)},
         {"found", TypeText(tensor)},
         {"method", quantization_.method}});
  }

  absl::Status IsNotForeign(const CheckpointTensor& tensor) const {
    for (const ForeignSuffix& foreign : kForeignSuffixes) {
      if (absl::EndsWith(tensor.name, foreign.suffix)) {
        return Contradicted(tensor, absl::StrCat("is what ", foreign.method, " writes, but the config declares ",
                                                 quantization_.method));
      }
    }
    if (absl::EndsWith(tensor.name, ".weight") && tensor.shape.size() >= 2 &&
        IsOneOf(kPackedTypes, tensor.dtype->proto)) {
      return Contradicted(tensor,
                          absl::StrCat("is a weight of integers, which are packed codes of some quantization, but the "
                                       "config declares ",
                                       quantization_.method));
    }
    return absl::OkStatus();
  }

  absl::Status CheckUnquantized() const {
    for (const CheckpointTensor& tensor : checkpoint_.tensors) {
      if (IsFp8(tensor)) {
        return Contradicted(tensor,
                            "is FP8, but the config declares no quantization: what its scales are is not known");
      }
      if (absl::EndsWith(tensor.name, kScaleSuffix)) {
        return Contradicted(tensor, "is the scale of a quantized weight, but the config declares no quantization");
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckBlockFp8() const {
    absl::flat_hash_map<std::string, const CheckpointTensor*> fp8_roles;
    for (const CheckpointTensor& tensor : checkpoint_.tensors) {
      if (absl::EndsWith(tensor.name, kScaleSuffix)) {
        RETURN_IF_ERROR(CheckScaleHasWeight(tensor));
      } else if (IsFp8(tensor)) {
        RETURN_IF_ERROR(CheckFp8Weight(tensor));
        fp8_roles.emplace(Role(tensor.name), &tensor);
      }
    }
    if (fp8_roles.empty()) {
      return Contradicted(checkpoint_.tensors.front(),
                          "is not FP8, nor is any other, but the config declares block-wise fp8");
    }
    return CheckRest(fp8_roles);
  }

  absl::Status CheckFp8Weight(const CheckpointTensor& weight) const {
    if (ignored_.Covers(weight.name)) {
      return Contradicted(weight, "is FP8, but the config says that its module is not quantized");
    }
    const CheckpointTensor* scale = Find(absl::StrCat(weight.name, kScaleSuffix));
    if (scale == nullptr) {
      return Contradicted(weight,
                          absl::StrCat("is FP8 but has no scale: there is no ", Quote(weight.name + kScaleSuffix)));
    }
    if (!IsOneOf(kScaleTypes, scale->dtype->proto)) {
      return Contradicted(*scale, "is the scale of an FP8 weight; it must be F32, BF16 or F16");
    }
    if (weight.shape.size() < 2) return Contradicted(weight, "is FP8 but no matrix, so it has no blocks of 128x128");
    const std::vector<int64_t> grid = Grid(weight.shape);
    if (IsGridStored(grid, scale->shape)) return absl::OkStatus();
    return Contradicted(*scale, absl::StrCat("is the scale of ", Quote(weight.name), " (", TypeText(weight),
                                             "), so its shape must be [", absl::StrJoin(grid, ", "),
                                             "], or that without its ones, or flat"));
  }

  // Some tools leave out dimensions of 1, or store the grid as one row.
  static bool IsGridStored(const std::vector<int64_t>& grid, const std::vector<int64_t>& stored) {
    const auto squeezed = [](std::vector<int64_t> shape) {
      shape.erase(std::remove(shape.begin(), shape.end(), 1), shape.end());
      return shape;
    };
    if (squeezed(stored) == squeezed(grid)) return true;
    int64_t count = 1;  // no more than the weight has elements
    for (const int64_t dimension : grid) count *= dimension;
    return stored == std::vector<int64_t>{count};
  }

  // One scale for each block of the last two dimensions.
  std::vector<int64_t> Grid(std::vector<int64_t> shape) const {
    for (size_t i = 0; i < 2; ++i) {
      int64_t& dimension = shape[shape.size() - 2 + i];
      dimension = dimension / quantization_.block_size[i] + (dimension % quantization_.block_size[i] != 0 ? 1 : 0);
    }
    return shape;
  }

  absl::Status CheckScaleHasWeight(const CheckpointTensor& scale) const {
    const std::string name = scale.name.substr(0, scale.name.size() - (sizeof(kScaleSuffix) - 1));
    const CheckpointTensor* weight = Find(name);
    if (weight == nullptr) return Contradicted(scale, absl::StrCat("is a scale, but there is no weight ", Quote(name)));
    if (IsFp8(*weight)) return absl::OkStatus();
    return Contradicted(
        scale, absl::StrCat("is a scale, but its weight ", Quote(name), " is ", TypeText(*weight), ", not F8_E4M3"));
  }

  // A weight that is FP8 in one layer is FP8 in every layer that the config does not except: an engine makes them
  // alike.
  absl::Status CheckRest(const absl::flat_hash_map<std::string, const CheckpointTensor*>& fp8_roles) const {
    for (const CheckpointTensor& tensor : checkpoint_.tensors) {
      if (IsFp8(tensor)) continue;
      const auto same = fp8_roles.find(Role(tensor.name));
      if (same == fp8_roles.end() || ignored_.Covers(tensor.name)) continue;
      return Contradicted(tensor, absl::StrCat("is not FP8, but ", Quote(same->second->name),
                                               " is, and the config does not say that this one is not quantized"));
    }
    return absl::OkStatus();
  }

  const Checkpoint& checkpoint_;
  const Quantization& quantization_;
  const ModuleSet ignored_;
};

}  // namespace

absl::Status CheckDtype(const std::string& file, const std::string& tensor, const DtypeInfo& dtype) {
  if (dtype.proto != v1::DATA_TYPE_UNSPECIFIED) return absl::OkStatus();
  return MakeError(Reason::kDtypeUnsupported,
                   absl::StrCat(Printable(file), ": tensor ", Quote(tensor), " is ", ToAbsl(dtype.name),
                                ", which cannot be served; these can: ", DtypeNames(DtypeUse::kServable)),
                   {{"file", Printable(file)}, {"tensor", Printable(tensor)}, {"dtype", std::string(dtype.name)}});
}

absl::Status CheckTensors(const Checkpoint& checkpoint, const Quantization& quantization) {
  return TensorCheck(checkpoint, quantization).Run();
}

}  // namespace weightbroker
