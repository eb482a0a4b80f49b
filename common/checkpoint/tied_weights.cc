#include "common/checkpoint/tied_weights.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

using Aliases = std::map<std::string, std::string>;

// Which name is the head's where which is the embedding's. The first pair whose embedding is there counts.
struct TiedPair {
  const char* embedding;
  const char* head;
};
constexpr TiedPair kTiedPairs[] = {
    {"model.embed_tokens.weight", "lm_head.weight"},                                // Llama, Qwen, Gemma, ...
    {"model.language_model.embed_tokens.weight", "lm_head.weight"},                 // ... inside a multi-modal model
    {"language_model.model.embed_tokens.weight", "language_model.lm_head.weight"},  // ... and its older form
    {"model.decoder.embed_tokens.weight", "lm_head.weight"},                        // OPT
    {"transformer.wte.weight", "lm_head.weight"},                                   // GPT-2, Falcon's forerunners
    {"transformer.word_embeddings.weight", "lm_head.weight"},                       // BLOOM, Falcon
    {"gpt_neox.embed_in.weight", "embed_out.weight"},                               // GPT-NeoX
    {"bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"},   // BERT with its language head
    {"roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"},        // RoBERTa with its language head
    {"shared.weight", "lm_head.weight"},                                            // T5
};

// Where a config says whether they are tied; the first that says so counts.
constexpr const char* kTextConfigs[] = {"text_config", "llm_config", "language_config"};

bool HasTensor(const std::vector<CheckpointTensor>& tensors, const std::string& name) {
  const auto it =
      std::lower_bound(tensors.begin(), tensors.end(), name,
                       [](const CheckpointTensor& tensor, const std::string& key) { return tensor.name < key; });
  return it != tensors.end() && it->name == name;
}

absl::Status AddFromMetadata(const std::vector<CheckpointTensor>& tensors, const Aliases& metadata, Aliases& aliases) {
  for (const auto& [name, kept] : metadata) {
    if (name == "format" || HasTensor(tensors, name) || !HasTensor(tensors, kept)) continue;
    const auto [it, is_new] = aliases.emplace(name, kept);
    if (is_new || it->second == kept) continue;
    return MakeError(Reason::kCheckpointMalformed,
                     absl::StrCat("tensor ", Quote(name), " is tied to ", Quote(it->second),
                                  " by one file's __metadata__ and to ", Quote(kept), " by another's"),
                     {{"tensor", Printable(name)}, {"first", Printable(it->second)}, {"second", Printable(kept)}});
  }
  return absl::OkStatus();
}

// nullopt if `config` does not say.
absl::StatusOr<std::optional<bool>> ReadTieFlag(const nlohmann::json& config) {
  const auto it = config.find("tie_word_embeddings");
  if (it == config.end() || it->is_null()) return std::nullopt;
  if (it->is_boolean()) return it->get<bool>();
  return MakeError(Reason::kConfigMalformed, "config.json: tie_word_embeddings is not true or false",
                   {{"file", "config.json"}});
}

absl::StatusOr<bool> SaysTied(const nlohmann::json& config) {
  ASSIGN_OR_RETURN(const auto at_top, ReadTieFlag(config));
  if (at_top.has_value()) return *at_top;
  for (const char* name : kTextConfigs) {
    const auto nested = config.find(name);
    if (nested == config.end() || !nested->is_object()) continue;
    ASSIGN_OR_RETURN(const auto flag, ReadTieFlag(*nested));
    if (flag.has_value()) return *flag;
  }
  return false;
}

void AddHead(const std::vector<CheckpointTensor>& tensors, Aliases& aliases) {
  for (const TiedPair& pair : kTiedPairs) {
    if (!HasTensor(tensors, pair.embedding)) continue;
    if (!HasTensor(tensors, pair.head)) aliases.emplace(pair.head, pair.embedding);
    return;
  }
}

}  // namespace

absl::StatusOr<Aliases> FindTiedWeights(const std::vector<CheckpointTensor>& tensors,
                                        const std::vector<Aliases>& metadata, const nlohmann::json& config) {
  Aliases aliases;
  for (const Aliases& of_file : metadata) RETURN_IF_ERROR(AddFromMetadata(tensors, of_file, aliases));
  ASSIGN_OR_RETURN(const bool tied, SaysTied(config));
  if (tied) AddHead(tensors, aliases);
  return aliases;
}

}  // namespace weightbroker
