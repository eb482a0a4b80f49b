// Tied weights: names that the model has but the files do not, because another tensor's bytes are theirs too.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint.h"

namespace weightbroker {

// Name -> the tensor whose memory it shares. Two sources are believed:
//   - the files' __metadata__: safetensors.torch.save_model writes there, for each tensor that it left out, the name
//     of the one that it kept;
//   - tie_word_embeddings in the config, where it is explicitly true: then the head is the embedding.
// A name that the files have is never an alias. `tensors` is sorted by name; `metadata` has one entry for each file.
// CHECKPOINT_MALFORMED if two files alias one name to different tensors, CONFIG_MALFORMED for a tie_word_embeddings
// that is not a boolean.
absl::StatusOr<std::map<std::string, std::string>> FindTiedWeights(
    const std::vector<CheckpointTensor>& tensors, const std::vector<std::map<std::string, std::string>>& metadata,
    const nlohmann::json& config);

}  // namespace weightbroker
