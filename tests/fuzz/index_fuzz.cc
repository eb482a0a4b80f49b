// The input is an index, then config.json, then the shards: of each its name and the text of its header, all with a NUL
// byte behind, and the size of its data in one byte. An empty index is none: then a shard may be model.safetensors.
#include <algorithm>
#include <cstring>
#include <set>

#include "common/checkpoint/checkpoint.h"
#include "common/identity/checkpoint_identity.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/target.h"
#include "tests/support/memory_files.h"

namespace weightbroker {
namespace {

std::string FileOf(std::string_view header, size_t data_size_bytes) {
  std::string bytes(8, '\0');
  const uint64_t length = header.size();
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes.append(header).append(data_size_bytes, 'x');
}

MemoryFileSystem MakeFolder(std::string_view input) {
  MemoryFileSystem files;
  if (const std::string_view index = TakeText(input); !index.empty()) {
    files.Add("model.safetensors.index.json", std::string(index));
  }
  const std::string_view config = TakeText(input);
  files.Add("config.json", config.empty() ? "{}" : std::string(config));
  while (!input.empty()) {
    const std::string name(TakeText(input));
    const std::string_view header = TakeText(input);
    files.Add(name, FileOf(header, TakeInteger<uint8_t>(input)));
  }
  return files;
}

// No name in an index leads out of the folder.
void CheckPaths(const MemoryFileSystem& files) {
  const std::string folder = MemoryFileSystem::kFolder;
  for (const std::string& path : files.asked_for()) {
    FUZZ_CHECK(path == folder || path.compare(0, folder.size() + 1, folder + "/") == 0);
    FUZZ_CHECK((path + "/").find("/../") == std::string::npos);
    FUZZ_CHECK((path + "/").find("/./") == std::string::npos);
    FUZZ_CHECK(path.find("//") == std::string::npos);
  }
}

void CheckTensor(const MemoryFileSystem& files, const Checkpoint& checkpoint, const CheckpointTensor& tensor) {
  const auto& shards = checkpoint.files.shard_names;
  FUZZ_CHECK(tensor.file_index >= 0 && static_cast<size_t>(tensor.file_index) < shards.size());
  const std::string& shard = shards[static_cast<size_t>(tensor.file_index)];
  FUZZ_CHECK(tensor.offset_bytes >= 10 && tensor.size_bytes >= 0);
  FUZZ_CHECK(tensor.offset_bytes + tensor.size_bytes <= files.SizeOf(shard));
  __int128 bits = tensor.dtype->bits;
  for (const int64_t dimension : tensor.shape) bits = std::min<__int128>(bits * dimension, __int128{1} << 64);
  FUZZ_CHECK(bits == __int128{8} * tensor.size_bytes);
  if (checkpoint.files.index_name.empty()) return;
  const auto entry = checkpoint.files.weight_map.find(tensor.name);
  FUZZ_CHECK(entry != checkpoint.files.weight_map.end() && entry->second == shard);
}

void CheckNoOverlap(const std::vector<CheckpointTensor>& tensors) {
  std::set<std::tuple<int32_t, int64_t, int64_t>> extents;
  for (const CheckpointTensor& tensor : tensors) {
    if (tensor.size_bytes > 0) {
      extents.emplace(tensor.file_index, tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes);
    }
  }
  std::tuple<int32_t, int64_t, int64_t> before = {-1, 0, 0};
  for (const auto& extent : extents) {
    FUZZ_CHECK(std::get<0>(before) != std::get<0>(extent) || std::get<2>(before) <= std::get<1>(extent));
    before = extent;
  }
}

void CheckAccepted(const MemoryFileSystem& files, const Checkpoint& checkpoint) {
  FUZZ_CHECK(!checkpoint.tensors.empty());
  FUZZ_CHECK(checkpoint.config.is_object());
  int64_t total_bytes = 0;
  for (size_t i = 0; i < checkpoint.tensors.size(); ++i) {
    const CheckpointTensor& tensor = checkpoint.tensors[i];
    CheckTensor(files, checkpoint, tensor);
    FUZZ_CHECK(i == 0 || checkpoint.tensors[i - 1].name < tensor.name);
    total_bytes += tensor.size_bytes;
  }
  CheckNoOverlap(checkpoint.tensors);
  FUZZ_CHECK(total_bytes == checkpoint.total_bytes);
  const bool has_index = !checkpoint.files.index_name.empty();
  FUZZ_CHECK(!has_index || checkpoint.files.weight_map.size() == checkpoint.tensors.size());
  const auto has = [&](const std::string& name) {
    return std::any_of(checkpoint.tensors.begin(), checkpoint.tensors.end(),
                       [&](const CheckpointTensor& tensor) { return tensor.name == name; });
  };
  for (const auto& [alias, target] : checkpoint.aliases) FUZZ_CHECK(!has(alias) && has(target));
}

// What makes up the identity is what makes up the checkpoint.
void CheckIdentity(MemoryFileSystem& files, const Checkpoint& checkpoint) {
  const auto identity = ReadCheckpointIdentity(files, MemoryFileSystem::kFolder);
  FUZZ_CHECK(identity.ok());
  size_t shards = 0;
  for (const FileIdentity& file : identity->files) {
    FUZZ_CHECK(file.stat.size_bytes == files.SizeOf(file.name));
    FUZZ_CHECK(file.header_sha256.size() == 64 || file.contents_sha256.size() == 64);
    if (!file.header_sha256.empty()) ++shards;
  }
  FUZZ_CHECK(shards == checkpoint.files.shard_names.size());
  FUZZ_CHECK(CheckUnchanged(files, *identity).ok());
}

}  // namespace
}  // namespace weightbroker

FUZZ_TARGET(index) {
  using namespace weightbroker;
  MemoryFileSystem files = MakeFolder(input);
  const auto checkpoint = OpenCheckpoint(files, MemoryFileSystem::kFolder);
  if (checkpoint.ok()) {
    CheckAccepted(files, *checkpoint);
    CheckIdentity(files, *checkpoint);
  } else {
    CheckRefusal(checkpoint.status());
  }
  CheckPaths(files);
}
