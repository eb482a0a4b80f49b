#include "tests/support/checkpoint_builder.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "common/checkpoint/dtype.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker::testing {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kIndexName[] = "model.safetensors.index.json";

size_t SizeBytes(const std::string& dtype, const std::vector<int64_t>& shape) {
  const DtypeInfo* row = FindDtype(dtype);
  if (row == nullptr) {
    std::fprintf(stderr, "CheckpointBuilder: there is no dtype %s\n", dtype.c_str());
    std::abort();
  }
  int64_t bits = row->bits;
  for (const int64_t dimension : shape) bits *= dimension;
  return static_cast<size_t>(bits / 8);
}

}  // namespace

CheckpointBuilder& CheckpointBuilder::Tensor(const std::string& name, const std::string& dtype,
                                             const std::vector<int64_t>& shape, const std::string& file) {
  shards_[file].push_back({name, dtype, shape});
  return *this;
}

CheckpointBuilder& CheckpointBuilder::BlockFp8(const std::string& name, const std::vector<int64_t>& shape,
                                               const std::string& file, const std::string& scale_dtype) {
  std::vector<int64_t> grid = shape;
  for (size_t i = grid.size() - 2; i < grid.size(); ++i) grid[i] = (grid[i] + 127) / 128;
  return Tensor(name, "F8_E4M3", shape, file).Tensor(name + "_scale_inv", scale_dtype, grid, file);
}

CheckpointBuilder& CheckpointBuilder::Metadata(const std::string& key, const std::string& value,
                                               const std::string& file) {
  metadata_[file][key] = value;
  return *this;
}

CheckpointBuilder& CheckpointBuilder::Config(const std::string& text) {
  config_ = text;
  return *this;
}

CheckpointBuilder& CheckpointBuilder::File(const std::string& name, const std::string& contents) {
  files_[name] = contents;
  return *this;
}

CheckpointBuilder& CheckpointBuilder::WithIndex() {
  has_index_ = true;
  return *this;
}

CheckpointBuilder& CheckpointBuilder::IndexEntry(const std::string& tensor, const std::string& file) {
  index_changes_[tensor] = file;
  return WithIndex();
}

CheckpointBuilder& CheckpointBuilder::NotIndexed(const std::string& tensor) { return IndexEntry(tensor, ""); }

CheckpointBuilder& CheckpointBuilder::WithoutShard(const std::string& file) {
  for (const Entry& entry : shards_[file]) IndexEntry(entry.name, file);
  shards_.erase(file);
  return *this;
}

std::string CheckpointBuilder::FileBytes(const std::string& file) const {
  Json header = Json::object();
  if (const auto it = metadata_.find(file); it != metadata_.end()) header["__metadata__"] = it->second;
  std::string data;
  if (const auto it = shards_.find(file); it != shards_.end()) {
    for (const Entry& entry : it->second) {
      const size_t begin = data.size();
      data += TensorBytes(entry.name, SizeBytes(entry.dtype, entry.shape));
      header[entry.name] = {{"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {begin, data.size()}}};
    }
  }
  return RawSafetensors(header.dump()) + data;
}

std::string CheckpointBuilder::IndexText() const {
  Json map = Json::object();
  for (const auto& [file, entries] : shards_) {
    for (const Entry& entry : entries) map[entry.name] = file;
  }
  for (const auto& [tensor, file] : index_changes_) {
    map.erase(tensor);
    if (!file.empty()) map[tensor] = file;
  }
  Json index = Json::object();
  index["metadata"] = Json::object();
  index["weight_map"] = map;
  return index.dump();
}

void CheckpointBuilder::Write(const std::string& folder) const {
  std::filesystem::create_directories(folder);
  if (!config_.empty()) WriteFile(folder + "/config.json", config_);
  for (const auto& [file, entries] : shards_) WriteFile(folder + "/" + file, FileBytes(file));
  if (has_index_) WriteFile(folder + "/" + kIndexName, IndexText());
  for (const auto& [name, contents] : files_) WriteFile(folder + "/" + name, contents);
}

std::string RawSafetensors(std::string_view header, size_t data_bytes) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(header.size() >> (8 * i) & 0xFF));
  return bytes.append(header).append(data_bytes, '\0');
}

std::string TensorBytes(const std::string& name, size_t size_bytes) {
  uint64_t state = 0xcbf29ce484222325u;
  for (const char c : name) state = (state ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  std::string bytes(size_bytes, '\0');
  for (char& byte : bytes) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<char>(state >> 56);
  }
  return bytes;
}

}  // namespace weightbroker::testing
