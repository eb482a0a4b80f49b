#include "common/synthetic/model.h"

#include <algorithm>
#include <span>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "common/base/embedded_file.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/plan/architecture.h"
#include "common/plan/architecture_rules.h"
#include "common/plan/expression.h"
#include "common/plan/tensor_roles.h"
#include "common/quant/gate.h"

namespace weightbroker {

std::span<const EmbeddedFile> EmbeddedModels();

namespace {

using OrderedJson = nlohmann::ordered_json;

std::string LabelOf(const EmbeddedFile& file) {
  const std::string name = file.label;
  return name.substr(0, name.rfind('.'));
}

// The architecture that a model's config names: it says which weights are quantized.
const Architecture& ArchitectureOf(const OrderedJson& model) {
  return *ArchitectureSet::Embedded().Find(model["config"]["architectures"][0].get<std::string>());
}

bool Describes(const Architecture& architecture, const std::string& name) {
  return std::find(architecture.names.begin(), architecture.names.end(), name) != architecture.names.end();
}

absl::Status Unfit(const std::string& field, const std::string& what) {
  return MakeError(Reason::kInvalidArgument, what, {{"field", field}});
}

// One model with numbers of its own: its file, its config, and what the two come to.
class ModelDraft {
 public:
  ModelDraft(const EmbeddedFile& file, const ModelRequest& request)
      : request_(request),
        label_(LabelOf(file)),
        model_(OrderedJson::parse(file.text)),
        architecture_(ArchitectureOf(model_)) {}

  absl::StatusOr<CheckpointDraft> Run() {
    RETURN_IF_ERROR(MakeConfig());
    if (request_.bytes.has_value()) RETURN_IF_ERROR(ChooseLayers());
    ASSIGN_OR_RETURN(const std::vector<TensorDraft> tensors, ListTensors());
    if (request_.fp8 && !has_fp8_) {
      return Unfit("fp8", absl::StrCat("no weight of ", label_, " is one that is quantized: leave it in BF16"));
    }
    CheckpointDraft draft;
    draft.config = config_;
    if (request_.shard_count > static_cast<int64_t>(tensors.size())) {
      return Unfit("shards", absl::StrCat(request_.shard_count, " files are more than the ", tensors.size(),
                                          " tensors that there are: take fewer, or more layers"));
    }
    DivideIntoShards(tensors, request_.shard_count, request_.max_shard_bytes, &draft);
    return draft;
  }

 private:
  absl::Status MakeConfig() {
    config_ = model_["config"];
    if (Describes(architecture_, request_.model)) config_["architectures"] = {request_.model};
    if (request_.published) config_.update(model_["published"]);
    for (const auto& [key, value] : request_.numbers) {
      if (!config_.contains(key) || !config_[key].is_number()) {
        return Unfit("set", absl::StrCat(Quote(key), " is no number of this config, which has: ", ListNumbers()));
      }
      config_[key] = value;
    }
    if (request_.layers.has_value()) config_[KeyOf("layers")] = *request_.layers;
    if (request_.experts.has_value()) {
      if (!model_.contains("experts")) return Unfit("experts", absl::StrCat(label_, " has no experts"));
      config_[KeyOf("experts")] = *request_.experts;
    }
    if (request_.fp8) {
      config_["quantization_config"] = {{"quant_method", "fp8"},
                                        {"fmt", "e4m3"},
                                        {"activation_scheme", "dynamic"},
                                        {"weight_block_size", {kFp8BlockSize[0], kFp8BlockSize[1]}}};
    }
    return absl::OkStatus();
  }

  std::string ListNumbers() const {
    std::vector<std::string> keys;
    for (const auto& [key, value] : config_.items()) {
      if (value.is_number()) keys.push_back(key);
    }
    return absl::StrJoin(keys, ", ");
  }

  std::string KeyOf(const char* what) const { return model_[what].get<std::string>(); }

  // The number under the key that the file names for `what`; 0 where it names none.
  int64_t NumberOf(const char* what) const {
    return model_.contains(what) ? config_.value(KeyOf(what), int64_t{0}) : 0;
  }

  // Layers beyond the dense ones are all alike, so that two lengths tell every other.
  absl::Status ChooseLayers() {
    const int64_t few = NumberOf("dense_layers") + 1;
    ASSIGN_OR_RETURN(const int64_t few_bytes, BytesWith(few));
    ASSIGN_OR_RETURN(const int64_t more_bytes, BytesWith(few + 1));
    const int64_t layer_bytes = more_bytes - few_bytes;
    const int64_t wanted = *request_.bytes - few_bytes + layer_bytes / 2;
    config_[KeyOf("layers")] = few + std::max<int64_t>(0, wanted) / layer_bytes;
    return absl::OkStatus();
  }

  absl::StatusOr<int64_t> BytesWith(int64_t layers) {
    config_[KeyOf("layers")] = layers;
    ASSIGN_OR_RETURN(const std::vector<TensorDraft> tensors, ListTensors());
    int64_t bytes = 0;
    for (const TensorDraft& tensor : tensors) bytes += tensor.size_bytes();
    return bytes;
  }

  absl::StatusOr<std::vector<TensorDraft>> ListTensors() {
    const nlohmann::json config = config_;  // as the planner reads it
    ConfigNumbers numbers(config, {""});
    for (const auto& [name, alternatives] : architecture_.numbers) numbers.Define(name, alternatives);
    tensors_.clear();
    const int64_t layers = NumberOf("layers");
    const int64_t dense = model_["tensors"].contains("expert") ? NumberOf("dense_layers") : layers;
    RETURN_IF_ERROR(AddScope(numbers, "once", -1));
    if (!config_.value("tie_word_embeddings", false)) RETURN_IF_ERROR(AddScope(numbers, "untied", -1));
    for (int64_t layer = 0; layer < layers + NumberOf("mtp_layers"); ++layer) {
      RETURN_IF_ERROR(AddScope(numbers, "layer", layer));
      RETURN_IF_ERROR(AddScope(numbers, layer < dense ? "dense_layer" : "expert_layer", layer));
      if (layer >= dense) RETURN_IF_ERROR(AddExperts(numbers, layer));
      if (layer >= layers) RETURN_IF_ERROR(AddScope(numbers, "mtp_layer", layer));
    }
    return tensors_;
  }

  absl::Status AddExperts(const ConfigNumbers& numbers, int64_t layer) {
    for (int64_t expert = 0; expert < NumberOf("experts"); ++expert) {
      RETURN_IF_ERROR(AddScope(numbers, "expert", layer, expert));
    }
    return absl::OkStatus();
  }

  absl::Status AddScope(const ConfigNumbers& numbers, const char* scope, int64_t layer, int64_t expert = -1) {
    if (!model_["tensors"].contains(scope)) return absl::OkStatus();
    for (const auto& [name, entry] : model_["tensors"][scope].items()) {
      TensorDraft tensor;
      tensor.name = absl::StrReplaceAll(
          name, {{kLayerPlaceholder, absl::StrCat(layer)}, {kExpertPlaceholder, absl::StrCat(expert)}});
      tensor.dtype = entry.is_object() ? entry["dtype"].get<std::string>() : "BF16";
      for (const auto& expression : entry.is_object() ? entry["shape"] : entry) {
        ASSIGN_OR_RETURN(const int64_t dimension, numbers.Evaluate(expression.get<std::string>()));
        tensor.shape.push_back(dimension);
      }
      Add(std::move(tensor));
    }
    return absl::OkStatus();
  }

  void Add(TensorDraft tensor) {
    if (!request_.fp8 || tensor.shape.size() != 2 || !absl::EndsWith(tensor.name, ".weight") ||
        !FindRule(architecture_, tensor.name)->quantize) {
      tensors_.push_back(std::move(tensor));
      return;
    }
    has_fp8_ = true;
    TensorDraft scale{absl::StrCat(tensor.name, kScaleSuffix), "F32", {}};
    for (size_t i = 0; i < 2; ++i) {
      scale.shape.push_back((tensor.shape[i] + kFp8BlockSize[i] - 1) / kFp8BlockSize[i]);
    }
    tensor.dtype = "F8_E4M3";
    tensors_.push_back(std::move(tensor));
    tensors_.push_back(std::move(scale));
  }

  const ModelRequest& request_;
  const std::string label_;
  const OrderedJson model_;
  const Architecture& architecture_;
  OrderedJson config_;
  std::vector<TensorDraft> tensors_;
  bool has_fp8_ = false;
};

// Whether `name` is the file's, or that of an architecture that is described together with its.
bool IsNamed(const EmbeddedFile& file, const std::string& name) {
  return LabelOf(file) == name || Describes(ArchitectureOf(OrderedJson::parse(file.text)), name);
}

}  // namespace

absl::StatusOr<CheckpointDraft> DraftModel(const ModelRequest& request) {
  std::vector<std::string> labels;
  for (const EmbeddedFile& file : EmbeddedModels()) {
    if (IsNamed(file, request.model)) return ModelDraft(file, request).Run();
    labels.push_back(LabelOf(file));
  }
  return MakeError(Reason::kArchitectureUnknown,
                   absl::StrCat("there is no model ", Quote(request.model), "; there are: ",
                                absl::StrJoin(labels, ", "), ", and the architectures that their configs name"),
                   {{"architecture", Printable(request.model)}, {"models", absl::StrJoin(labels, ",")}});
}

std::vector<ModelName> ListModels() {
  std::vector<ModelName> models;
  for (const EmbeddedFile& file : EmbeddedModels()) {
    const OrderedJson model = OrderedJson::parse(file.text);
    models.push_back(
        {LabelOf(file), model["config"]["architectures"][0].get<std::string>(), model["model"].get<std::string>()});
  }
  return models;
}

}  // namespace weightbroker
