// A Hugging Face model folder: config.json and either model.safetensors or an index with its shards.
//
//   auto checkpoint = OpenCheckpoint(RealFileSystem(), "/models/llama");
//   if (!checkpoint.ok()) return checkpoint.status();        // the first fault, with file, tensor, expected, found
//   for (const CheckpointTensor& tensor : checkpoint->tensors) ...
//
// Opening reads headers only and takes no memory for weights. Everything is checked here, before anything is allocated:
// each header, the index against the files both ways, and names across files. Thread-safe: all functions are pure.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/file.h"
#include "common/checkpoint/safetensors.h"

namespace weightbroker {

// Which files make up the checkpoint. Names are relative to `folder`, never outside it ("../" in an index is refused),
// though a symbolic link in the folder may lead anywhere (a hub cache's does): access policy is the caller's.
struct CheckpointFiles {
  std::string folder;                             // absolute, symbolic links resolved
  std::string config_name;                        // "config.json"
  std::string index_name;                         // "model.safetensors.index.json", or empty
  std::vector<std::string> side_names;            // of kQuantizationSideFiles, those that exist
  std::vector<std::string> shard_names;           // sorted
  std::map<std::string, std::string> weight_map;  // the index's: tensor -> shard; empty without an index
};

// Files beside config.json in which a quantization method can hide: ModelOpt's, AutoGPTQ's, AutoAWQ's, and two that
// other tools write.
inline constexpr const char* kQuantizationSideFiles[] = {"hf_quant_config.json", "quantize_config.json",
                                                         "quant_config.json", "quantization_config.json",
                                                         "quant_model_description.json"};

// Finds the files and parses the index, nothing else. MODEL_NOT_FOUND if `folder` is none; CHECKPOINT_INCOMPLETE naming
// what is missing; CHECKPOINT_NOT_SAFETENSORS for a folder of pickles; CHECKPOINT_PATH_UNSAFE for a shard's name that
// leads out of the folder; CHECKPOINT_MALFORMED for an index that is none; CHECKPOINT_INDEX_MISMATCH if there are both
// model.safetensors and an index of other files.
absl::StatusOr<CheckpointFiles> FindCheckpointFiles(FileSystem& file_system, const std::string& folder);

struct CheckpointTensor {
  std::string name;
  const DtypeInfo* dtype = nullptr;
  std::vector<int64_t> shape;
  int32_t file_index = 0;    // into Checkpoint::files.shard_names
  int64_t offset_bytes = 0;  // from the start of the file
  int64_t size_bytes = 0;
};

struct Checkpoint {
  CheckpointFiles files;
  nlohmann::json config;                             // config.json
  std::map<std::string, nlohmann::json> side_files;  // by name
  std::vector<CheckpointTensor> tensors;             // sorted by name; never empty
  std::map<std::string, std::string> aliases;        // tied weights: name -> the tensor of `tensors` it shares
  int64_t total_bytes = 0;                           // of all tensors, aliases not counted
};

// Finds, reads and checks all of it. Does not judge quantization or dtypes: see quant/gate.h. Fails as
// FindCheckpointFiles and ReadSafetensorsHeader do, and with CHECKPOINT_INDEX_MISMATCH where index and files do not
// name the same tensors, CHECKPOINT_MALFORMED for a tensor that is in two files, CHECKPOINT_EMPTY without any tensor,
// CONFIG_MALFORMED.
absl::StatusOr<Checkpoint> OpenCheckpoint(FileSystem& file_system, const std::string& folder);

}  // namespace weightbroker
