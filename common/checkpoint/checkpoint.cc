#include "common/checkpoint/checkpoint.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/json.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/tied_weights.h"

namespace weightbroker {
namespace {

constexpr int64_t kMaxConfigBytes = 16 << 20;

absl::StatusOr<nlohmann::json> ReadConfig(FileSystem& file_system, const CheckpointFiles& files,
                                          const std::string& name) {
  ASSIGN_OR_RETURN(const std::string text,
                   file_system.ReadSmallFile(absl::StrCat(files.folder, "/", name), kMaxConfigBytes));
  auto config = ParseStrictJson(text);
  if (config.ok()) return config;
  const bool is_pythons = text.find("Infinity") != std::string::npos || text.find("NaN") != std::string::npos;
  return MakeError(
      Reason::kConfigMalformed,
      absl::StrCat(name, ": is not valid JSON: ", std::string(config.status().message()),
                   is_pythons ? " (Python writes Infinity and NaN, which JSON does not have; edit them out)" : ""),
      {{"file", name}});
}

absl::Status ReadConfigs(FileSystem& file_system, Checkpoint& checkpoint) {
  const CheckpointFiles& files = checkpoint.files;
  ASSIGN_OR_RETURN(checkpoint.config, ReadConfig(file_system, files, files.config_name));
  if (!checkpoint.config.is_object()) {
    return MakeError(Reason::kConfigMalformed, absl::StrCat(files.config_name, ": is not a JSON object"),
                     {{"file", files.config_name}});
  }
  for (const std::string& name : files.side_names) {
    ASSIGN_OR_RETURN(checkpoint.side_files[name], ReadConfig(file_system, files, name));
  }
  return absl::OkStatus();
}

// Appends the tensors of one file, and its __metadata__.
absl::Status ReadShard(FileSystem& file_system, int32_t file_index, Checkpoint& checkpoint,
                       std::vector<std::map<std::string, std::string>>& metadata) {
  const std::string& name = checkpoint.files.shard_names[static_cast<size_t>(file_index)];
  ASSIGN_OR_RETURN(const auto file,
                   file_system.Open(absl::StrCat(checkpoint.files.folder, "/", name), ReadMode::kBuffered));
  ASSIGN_OR_RETURN(SafetensorsHeader header, ReadSafetensorsHeader(*file, name));
  if (__builtin_add_overflow(checkpoint.total_bytes, header.data_size_bytes, &checkpoint.total_bytes)) {
    return MakeError(Reason::kCheckpointTooLarge,
                     absl::StrCat(Printable(name), ": with it the checkpoint exceeds 2^63 bytes"),
                     {{"file", Printable(name)}});
  }
  for (SafetensorsTensor& tensor : header.tensors) {
    checkpoint.tensors.push_back({std::move(tensor.name), tensor.dtype, std::move(tensor.shape), file_index,
                                  header.data_offset_bytes + tensor.begin_bytes, tensor.size_bytes()});
  }
  metadata.push_back(std::move(header.metadata));
  return absl::OkStatus();
}

// Compares the checkpoint's tensors, sorted by name, with what the index says, both ways.
class IndexCheck {
 public:
  explicit IndexCheck(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  absl::Status NoTensorIsInTwoFiles() const {
    const auto& tensors = checkpoint_.tensors;
    const auto same_name = [](const CheckpointTensor& a, const CheckpointTensor& b) { return a.name == b.name; };
    const auto twice = std::adjacent_find(tensors.begin(), tensors.end(), same_name);
    if (twice == tensors.end()) return absl::OkStatus();
    const std::string& first = ShardOf(*twice);
    const std::string& second = ShardOf(*(twice + 1));
    return MakeError(
        Reason::kCheckpointMalformed,
        absl::StrCat("tensor ", Quote(twice->name), " is in two files, ", Quote(first), " and ", Quote(second),
                     ": it is not known which counts"),
        {{"tensor", Printable(twice->name)}, {"file", Printable(first)}, {"other_file", Printable(second)}});
  }

  absl::Status EachTensorIsWhereTheIndexSays() const {
    const auto& weight_map = checkpoint_.files.weight_map;
    for (const CheckpointTensor& tensor : checkpoint_.tensors) {
      const auto entry = weight_map.find(tensor.name);
      if (entry == weight_map.end()) return NotIndexed(tensor);
      if (entry->second != ShardOf(tensor)) return ElsewhereThanIndexed(tensor.name, entry->second, ShardOf(tensor));
    }
    return absl::OkStatus();
  }

  // After the above, a tensor of the index that is in its shard is one of the checkpoint's.
  absl::Status EachTensorOfTheIndexIsThere() const {
    auto tensor = checkpoint_.tensors.begin();
    for (const auto& [name, shard] : checkpoint_.files.weight_map) {
      if (tensor == checkpoint_.tensors.end() || tensor->name != name) return MissingFromShard(name, shard);
      ++tensor;
    }
    return absl::OkStatus();
  }

 private:
  const std::string& ShardOf(const CheckpointTensor& tensor) const {
    return checkpoint_.files.shard_names[static_cast<size_t>(tensor.file_index)];
  }

  absl::Status NotIndexed(const CheckpointTensor& tensor) const {
    return MakeError(
        Reason::kCheckpointIndexMismatch,
        absl::StrCat(Printable(ShardOf(tensor)), ": has tensor ", Quote(tensor.name), ", which ",
                     checkpoint_.files.index_name, " does not list: index and file are of different versions"),
        {{"file", Printable(ShardOf(tensor))}, {"tensor", Printable(tensor.name)}});
  }
  absl::Status ElsewhereThanIndexed(const std::string& name, const std::string& indexed,
                                    const std::string& found) const {
    return MakeError(
        Reason::kCheckpointIndexMismatch,
        absl::StrCat("tensor ", Quote(name), " is in ", Quote(found), " but ", checkpoint_.files.index_name, " says ",
                     Quote(indexed), ": index and files are of different versions"),
        {{"tensor", Printable(name)}, {"expected_file", Printable(indexed)}, {"found_file", Printable(found)}});
  }
  absl::Status MissingFromShard(const std::string& name, const std::string& shard) const {
    return MakeError(
        Reason::kCheckpointIndexMismatch,
        absl::StrCat(Printable(shard), ": lacks tensor ", Quote(name), ", which ", checkpoint_.files.index_name,
                     " says it has: index and file are of different versions"),
        {{"file", Printable(shard)}, {"tensor", Printable(name)}});
  }

  const Checkpoint& checkpoint_;
};

absl::Status CheckNames(const Checkpoint& checkpoint) {
  const IndexCheck check(checkpoint);
  RETURN_IF_ERROR(check.NoTensorIsInTwoFiles());
  if (!checkpoint.files.index_name.empty()) {
    RETURN_IF_ERROR(check.EachTensorIsWhereTheIndexSays());
    RETURN_IF_ERROR(check.EachTensorOfTheIndexIsThere());
  }
  if (!checkpoint.tensors.empty()) return absl::OkStatus();
  return MakeError(
      Reason::kCheckpointEmpty,
      absl::StrCat(Printable(checkpoint.files.folder), ": its weights have no tensors, so there is nothing to serve"),
      {{"folder", Printable(checkpoint.files.folder)}});
}

}  // namespace

absl::StatusOr<Checkpoint> OpenCheckpoint(FileSystem& file_system, const std::string& folder) {
  Checkpoint checkpoint;
  ASSIGN_OR_RETURN(checkpoint.files, FindCheckpointFiles(file_system, folder));
  RETURN_IF_ERROR(ReadConfigs(file_system, checkpoint));
  std::vector<std::map<std::string, std::string>> metadata;
  for (size_t i = 0; i < checkpoint.files.shard_names.size(); ++i) {
    RETURN_IF_ERROR(ReadShard(file_system, static_cast<int32_t>(i), checkpoint, metadata));
  }
  std::sort(checkpoint.tensors.begin(), checkpoint.tensors.end(),
            [](const CheckpointTensor& a, const CheckpointTensor& b) { return a.name < b.name; });
  RETURN_IF_ERROR(CheckNames(checkpoint));
  ASSIGN_OR_RETURN(checkpoint.aliases, FindTiedWeights(checkpoint.tensors, metadata, checkpoint.config));
  return checkpoint;
}

}  // namespace weightbroker
