// FindCheckpointFiles: which files of a folder make up the checkpoint.
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/base/error.h"
#include "common/base/json.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/checkpoint.h"

namespace weightbroker {
namespace {

using Json = nlohmann::json;

constexpr char kConfigName[] = "config.json";
constexpr char kSingleName[] = "model.safetensors";
constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr int64_t kMaxIndexBytes = 100'000'000;

// What a folder holds in place of the files that are looked for, and what to do about it.
struct ForeignFolder {
  const char* prefix;
  const char* suffix;
  Reason reason;
  const char* advice;
};
constexpr ForeignFolder kForeignFolders[] = {
    {"model-", ".safetensors", Reason::kCheckpointIncomplete,
     "is one of several shards, but their index is missing; download model.safetensors.index.json too"},
    {"adapter_model", ".safetensors", Reason::kCheckpointIncomplete,
     "is an adapter (LoRA), not a model; merge it into its base model first"},
    {"", ".safetensors", Reason::kCheckpointIncomplete,
     "has another name; name it model.safetensors or write an index"},
    {"", ".bin", Reason::kCheckpointNotSafetensors,
     "is a pickle, which can run code when it is read; convert it to safetensors"},
    {"", ".pth", Reason::kCheckpointNotSafetensors,
     "is a pickle, which can run code when it is read; convert it to safetensors"},
    {"", ".pt", Reason::kCheckpointNotSafetensors,
     "is a pickle, which can run code when it is read; convert it to safetensors"},
    {"", ".ckpt", Reason::kCheckpointNotSafetensors,
     "is a pickle, which can run code when it is read; convert it to safetensors"},
    {"", ".gguf", Reason::kCheckpointNotSafetensors, "is a GGUF file; convert it to safetensors"},
    {"", ".h5", Reason::kCheckpointNotSafetensors, "is a TensorFlow checkpoint; convert it to safetensors"},
    {"", ".msgpack", Reason::kCheckpointNotSafetensors, "is a Flax checkpoint; convert it to safetensors"},
    {"", ".onnx", Reason::kCheckpointNotSafetensors, "is an ONNX graph; convert its weights to safetensors"},
    {"", ".incomplete", Reason::kCheckpointIncomplete, "is a download that has not finished"},
};

absl::StatusOr<bool> Exists(FileSystem& file_system, const std::string& path) {
  const auto stat = file_system.Stat(path);
  if (stat.ok()) return true;
  if (HasReason(stat.status(), Reason::kModelNotFound)) return false;
  return stat.status();
}

absl::Status NoWeights(FileSystem& file_system, const std::string& folder) {
  ASSIGN_OR_RETURN(const auto names, file_system.ListFolder(folder));
  for (const ForeignFolder& kind : kForeignFolders) {
    for (const std::string& name : names) {
      if (!absl::StartsWith(name, kind.prefix) || !absl::EndsWith(name, kind.suffix)) continue;
      return MakeError(kind.reason,
                       absl::StrCat(Printable(folder), ": has neither ", kSingleName, " nor ", kIndexName, ", but ",
                                    Quote(name), " ", kind.advice),
                       {{"folder", Printable(folder)}, {"file", Printable(name)}});
    }
  }
  return MakeError(Reason::kCheckpointIncomplete,
                   absl::StrCat(Printable(folder), ": has neither ", kSingleName, " nor ", kIndexName,
                                ": there are no weights in it; download it again"),
                   {{"folder", Printable(folder)}, {"file", kSingleName}});
}

absl::Status Malformed(const std::string& text) {
  return MakeError(Reason::kCheckpointMalformed, absl::StrCat(kIndexName, ": ", text), {{"file", kIndexName}});
}

// A shard's name must lead to a file of the folder itself, however it is joined to it and whatever reads it.
bool IsSafeName(const std::string& name) {
  if (name.find_first_of(std::string_view("\\\0", 2)) != std::string::npos) return false;
  for (const auto component : absl::StrSplit(name, '/')) {
    if (component.empty() || component == "." || component == "..") return false;
  }
  return true;
}

absl::StatusOr<std::map<std::string, std::string>> ReadIndex(FileSystem& file_system, const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, file_system.ReadSmallFile(path, kMaxIndexBytes));
  const auto index = ParseStrictJson(text);
  if (!index.ok()) return Malformed(absl::StrCat("is not valid JSON: ", std::string(index.status().message())));
  if (!index->is_object()) return Malformed("is not a JSON object");
  const auto map = index->find("weight_map");
  if (map == index->end() || !map->is_object()) return Malformed("has no weight_map object");
  std::map<std::string, std::string> result;
  for (const auto& [tensor, shard] : map->items()) {
    if (!shard.is_string())
      return Malformed(absl::StrCat("maps ", Quote(tensor), " to something that is no file name"));
    const auto& name = shard.get_ref<const std::string&>();
    if (!IsSafeName(name)) {
      return MakeError(Reason::kCheckpointPathUnsafe,
                       absl::StrCat(kIndexName, ": maps ", Quote(tensor), " to ", Quote(name),
                                    ", which is not the name of a file inside the folder"),
                       {{"file", kIndexName}, {"tensor", Printable(tensor)}, {"shard", Printable(name)}});
    }
    result.emplace(tensor, name);
  }
  if (result.empty()) {
    return MakeError(Reason::kCheckpointEmpty, absl::StrCat(kIndexName, ": its weight_map names no tensors"),
                     {{"file", kIndexName}});
  }
  return result;
}

absl::Status CheckShardsExist(FileSystem& file_system, const CheckpointFiles& files) {
  for (const std::string& name : files.shard_names) {
    ASSIGN_OR_RETURN(const bool exists, Exists(file_system, absl::StrCat(files.folder, "/", name)));
    if (exists) continue;
    return MakeError(
        Reason::kCheckpointIncomplete,
        absl::StrCat(Quote(name), ": is named by ", kIndexName, " but is not in ", Printable(files.folder),
                     " (or is a link to a file that is gone): the download did not finish; start it again"),
        {{"file", Printable(name)}, {"folder", Printable(files.folder)}});
  }
  return absl::OkStatus();
}

// Some readers take model.safetensors where there are both, others the index: only where both say the same is it
// served.
absl::Status CheckSingleAgainstIndex(const CheckpointFiles& files) {
  if (files.shard_names == std::vector<std::string>{kSingleName}) return absl::OkStatus();
  return MakeError(
      Reason::kCheckpointIndexMismatch,
      absl::StrCat(Printable(files.folder), ": has ", kSingleName, " and also ", kIndexName, ", which names ",
                   files.shard_names.size(), " other files: engines differ on which of them counts; remove one"),
      {{"folder", Printable(files.folder)}, {"file", kIndexName}});
}

absl::Status FindWeights(FileSystem& file_system, CheckpointFiles& files) {
  const std::string index_path = absl::StrCat(files.folder, "/", kIndexName);
  ASSIGN_OR_RETURN(const bool has_index, Exists(file_system, index_path));
  ASSIGN_OR_RETURN(const bool has_single, Exists(file_system, absl::StrCat(files.folder, "/", kSingleName)));
  if (!has_index) {
    if (!has_single) return NoWeights(file_system, files.folder);
    files.shard_names = {kSingleName};
    return absl::OkStatus();
  }
  files.index_name = kIndexName;
  ASSIGN_OR_RETURN(files.weight_map, ReadIndex(file_system, index_path));
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : files.weight_map) shards.insert(shard);
  files.shard_names.assign(shards.begin(), shards.end());
  if (has_single) RETURN_IF_ERROR(CheckSingleAgainstIndex(files));
  return CheckShardsExist(file_system, files);
}

}  // namespace

absl::StatusOr<CheckpointFiles> FindCheckpointFiles(FileSystem& file_system, const std::string& folder) {
  CheckpointFiles files;
  ASSIGN_OR_RETURN(files.folder, file_system.RealPath(folder));
  ASSIGN_OR_RETURN(const FileStat stat, file_system.Stat(files.folder));
  if (!stat.is_directory) {
    return MakeError(
        Reason::kModelNotFound,
        absl::StrCat(Printable(folder), ": is not a folder; a model is a folder with config.json and weights"),
        {{"folder", Printable(folder)}});
  }
  files.config_name = kConfigName;
  ASSIGN_OR_RETURN(const bool has_config, Exists(file_system, absl::StrCat(files.folder, "/", kConfigName)));
  if (!has_config) {
    return MakeError(Reason::kCheckpointIncomplete,
                     absl::StrCat(Printable(files.folder), ": has no ", kConfigName,
                                  ", which says how the weights are meant; download it from where they come from"),
                     {{"folder", Printable(files.folder)}, {"file", kConfigName}});
  }
  for (const char* name : kQuantizationSideFiles) {
    ASSIGN_OR_RETURN(const bool exists, Exists(file_system, absl::StrCat(files.folder, "/", name)));
    if (exists) files.side_names.emplace_back(name);
  }
  RETURN_IF_ERROR(FindWeights(file_system, files));
  return files;
}

}  // namespace weightbroker
