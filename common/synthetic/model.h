// Checkpoints of the architectures that can be split, with names and shapes as published ones have them: from the files
// in common/synthetic/models/, one for each file in common/plan/architectures/.
//
//   ASSIGN_OR_RETURN(const CheckpointDraft draft, DraftModel({.model = "deepseek", .layers = 4, .fp8 = true}));
//   RETURN_IF_ERROR(WriteCheckpoint(draft, folder, {}));
//
// Thread-safe: pure functions.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/synthetic/checkpoint_draft.h"

namespace weightbroker {

struct ModelRequest {
  std::string model;       // a file's name, as "deepseek", or an architecture's, as "DeepseekV3ForCausalLM"
  bool published = false;  // the numbers of the published model that the file names; else small ones
  std::optional<int64_t> layers = std::nullopt;
  std::optional<int64_t> experts = std::nullopt;
  std::optional<int64_t> bytes = std::nullopt;  // as many layers as come nearest
  std::map<std::string, int64_t> numbers = {};  // others of the config, by key
  bool fp8 = false;                             // block-wise FP8, with scales; else BF16
  int64_t shard_count = 0;                      // 0: as many as max_shard_bytes asks for
  int64_t max_shard_bytes = 5'000'000'000;
};

// ARCHITECTURE_UNKNOWN lists the models that there are. INVALID_ARGUMENT for numbers that do not fit: experts of a
// model that has none, fp8 of one that has no weights to quantize.
absl::StatusOr<CheckpointDraft> DraftModel(const ModelRequest& request);

// The names of the files, sorted, and which published model's numbers each has.
struct ModelName {
  std::string label;
  std::string architecture;  // the one that its config names
  std::string published;
};
std::vector<ModelName> ListModels();

}  // namespace weightbroker
