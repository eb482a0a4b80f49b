// A checkpoint before it is written: what its files are to say, right or wrong.
//
//   CheckpointDraft draft;
//   draft.config = {{"model_type", "bench"}};
//   draft.shards.push_back({.name = "model.safetensors", .tensors = {{"w", "BF16", {64, 64}}}});
//   RETURN_IF_ERROR(WriteCheckpoint(draft, "/tmp/model", {.seed = 7}));      // SYSTEM_ERROR: is the disk full?
//
// Values; not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace weightbroker {

struct TensorDraft {
  std::string name;
  std::string dtype;  // as safetensors spell it
  std::vector<int64_t> shape;

  int64_t size_bytes() const;
};

struct ShardDraft {
  std::string name;  // of its file
  std::vector<TensorDraft> tensors = {};

  // What makes the file a wrong one; see common/synthetic/faults.h.
  std::function<void(nlohmann::ordered_json&)> edit_header = nullptr;
  std::function<void(std::string&)> edit_header_text = nullptr;  // after that
  std::optional<uint64_t> stated_header_bytes = std::nullopt;    // in place of the header's length
  int64_t missing_bytes = 0;                                     // cut off the end
  std::string trailing_bytes = {};                               // behind the end
  std::optional<std::string> contents = std::nullopt;            // in place of all that
  bool is_folder = false;
  bool is_absent = false;

  int64_t data_bytes() const;
};

struct CheckpointDraft {
  nlohmann::ordered_json config;
  std::vector<ShardDraft> shards;
  std::map<std::string, std::string> weight_map;  // the index's; written if `has_index`
  bool has_index = false;
  std::map<std::string, std::string> files;  // others by name, or those above with other contents

  int64_t tensor_count() const;
  int64_t total_bytes() const;  // of all tensors
};

inline constexpr char kConfigName[] = "config.json";
inline constexpr char kIndexName[] = "model.safetensors.index.json";
inline constexpr char kSingleShardName[] = "model.safetensors";

// "model-00001-of-00003.safetensors" for the first of three, from 0; kSingleShardName for the only one.
std::string ShardFileName(int64_t index, int64_t count);

// Puts tensors into shards of at most `max_shard_bytes` each (one that is larger has a shard of its own), or, if
// `shard_count` is not 0, into that many of about equal length; and an index beside them if there are several.
void DivideIntoShards(const std::vector<TensorDraft>& tensors, int64_t shard_count, int64_t max_shard_bytes,
                      CheckpointDraft* draft);

// Where the data of the shard's first tensor begin in its file.
int64_t HeaderBytes(const ShardDraft& shard);

struct WriteOptions {
  uint64_t seed = 1;
  bool sparse = false;            // holes in place of contents: the files take no room, and read as zeros
  int64_t sparse_head_bytes = 0;  // with that: so many at the start of each tensor are written all the same
  std::function<void(int64_t done_bytes)> on_progress = nullptr;  // may be empty
};

// Makes the folder if need be and writes the files. INVALID_ARGUMENT if something is in it already; SYSTEM_ERROR with
// path and errno. What has been written stays then.
absl::Status WriteCheckpoint(const CheckpointDraft& draft, const std::string& folder, const WriteOptions& options);

}  // namespace weightbroker
