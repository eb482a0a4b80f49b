#include "bench/bench_checkpoint.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"

namespace weightbroker::bench {
namespace {

constexpr char kStampName[] = "bench_checkpoint.json";
constexpr size_t kBlockBytes = 8 << 20;

// What the folder was made from; written last, so that a half-written folder has none.
std::string StampOf(const BenchCheckpoint& checkpoint) {
  return nlohmann::json({{"total_bytes", checkpoint.total_bytes},
                         {"tensor_count", checkpoint.tensor_count},
                         {"shard_count", checkpoint.shard_count},
                         {"has_holes", checkpoint.has_holes},
                         {"format", 2}})
      .dump();
}

std::string ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

absl::Status WriteText(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  return file ? absl::OkStatus() : absl::InternalError(absl::StrCat("cannot write ", path));
}

std::string ShardName(const BenchCheckpoint& checkpoint, int64_t index) {
  char name[64];
  std::snprintf(name, sizeof(name), "model-%05d-of-%05d.safetensors", static_cast<int>(index + 1),
                static_cast<int>(checkpoint.shard_count));
  return name;
}

std::string TensorName(int64_t index) { return absl::StrCat("model.layers.", index, ".weight"); }

int64_t ElementsOf(const BenchCheckpoint& checkpoint, int64_t tensor) {
  const int64_t elements = checkpoint.total_bytes / 2;
  const int64_t rest = elements % checkpoint.tensor_count;
  return elements / checkpoint.tensor_count + (tensor < rest ? 1 : 0);
}

struct Shard {
  std::string header;  // with its length before it
  int64_t data_bytes = 0;
  int64_t first_tensor = 0;
  int64_t end_tensor = 0;
};

Shard DescribeShard(const BenchCheckpoint& checkpoint, int64_t first_tensor, int64_t end_tensor) {
  nlohmann::json header;
  Shard shard;
  shard.first_tensor = first_tensor;
  shard.end_tensor = end_tensor;
  for (int64_t i = first_tensor; i < end_tensor; ++i) {
    const int64_t end = shard.data_bytes + ElementsOf(checkpoint, i) * 2;
    header[TensorName(i)] = {
        {"dtype", "BF16"}, {"shape", {ElementsOf(checkpoint, i)}}, {"data_offsets", {shard.data_bytes, end}}};
    shard.data_bytes = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  shard.header.assign(reinterpret_cast<const char*>(&length), sizeof(length));
  shard.header += text;
  return shard;
}

std::vector<char> RandomBlock() {
  std::vector<char> block(kBlockBytes);
  std::mt19937_64 random(1);
  for (size_t i = 0; i < block.size(); i += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(block.data() + i, &word, sizeof(word));
  }
  return block;
}

// A page that differs from tensor to tensor.
void FillPage(int64_t tensor, std::vector<char>* page) {
  std::mt19937_64 random(static_cast<uint64_t>(tensor));
  for (size_t i = 0; i + sizeof(uint64_t) <= page->size(); i += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(page->data() + i, &word, sizeof(word));
  }
}

absl::Status WriteShardWithHoles(const std::string& path, const BenchCheckpoint& checkpoint, const Shard& shard) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << shard.header;
  int64_t begin = static_cast<int64_t>(shard.header.size());
  std::vector<char> page(kHolePageBytes);
  for (int64_t i = shard.first_tensor; i < shard.end_tensor; ++i) {
    const int64_t size = ElementsOf(checkpoint, i) * 2;
    FillPage(i, &page);
    file.seekp(begin);
    file.write(page.data(), std::min(size, kHolePageBytes));
    begin += size;
  }
  file.close();
  std::error_code error;
  std::filesystem::resize_file(path, shard.header.size() + static_cast<uintmax_t>(shard.data_bytes), error);
  return file && !error ? absl::OkStatus() : absl::InternalError(absl::StrCat("cannot write ", path));
}

absl::Status WriteShard(const std::string& path, const BenchCheckpoint& checkpoint, const Shard& shard,
                        const std::vector<char>& block) {
  if (checkpoint.has_holes) return WriteShardWithHoles(path, checkpoint, shard);
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << shard.header;
  for (int64_t left = shard.data_bytes; left > 0;) {
    const int64_t part = std::min<int64_t>(left, static_cast<int64_t>(block.size()));
    file.write(block.data(), part);
    left -= part;
  }
  file.close();
  return file ? absl::OkStatus() : absl::InternalError(absl::StrCat("cannot write ", path, ": is the disk full?"));
}

}  // namespace

std::string BenchShardPath(const std::string& folder, const BenchCheckpoint& checkpoint, int64_t index) {
  return absl::StrCat(folder, "/", ShardName(checkpoint, index));
}

absl::Status WriteBenchCheckpoint(const std::string& folder, const BenchCheckpoint& checkpoint) {
  const std::string stamp_path = absl::StrCat(folder, "/", kStampName);
  if (ReadText(stamp_path) == StampOf(checkpoint)) return absl::OkStatus();
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return absl::InternalError(absl::StrCat("cannot make ", folder, ": ", error.message()));
  std::filesystem::remove(stamp_path, error);

  const std::vector<char> block = RandomBlock();
  nlohmann::json weight_map;
  for (int64_t s = 0; s < checkpoint.shard_count; ++s) {
    const int64_t first = checkpoint.tensor_count * s / checkpoint.shard_count;
    const int64_t end = checkpoint.tensor_count * (s + 1) / checkpoint.shard_count;
    RETURN_IF_ERROR(
        WriteShard(BenchShardPath(folder, checkpoint, s), checkpoint, DescribeShard(checkpoint, first, end), block));
    for (int64_t i = first; i < end; ++i) weight_map[TensorName(i)] = ShardName(checkpoint, s);
  }
  const nlohmann::json index = {{"metadata", {{"total_size", checkpoint.total_bytes / 2 * 2}}},
                                {"weight_map", weight_map}};
  RETURN_IF_ERROR(WriteText(absl::StrCat(folder, "/model.safetensors.index.json"), index.dump()));
  RETURN_IF_ERROR(WriteText(absl::StrCat(folder, "/config.json"),
                            R"({"architectures": ["BenchModel"], "model_type": "bench", "torch_dtype": "bfloat16"})"));
  return WriteText(stamp_path, StampOf(checkpoint));
}

std::vector<BenchTensor> ListBenchTensors(const std::string& folder, const BenchCheckpoint& checkpoint) {
  std::vector<BenchTensor> tensors;
  for (int64_t s = 0; s < checkpoint.shard_count; ++s) {
    const int64_t first = checkpoint.tensor_count * s / checkpoint.shard_count;
    const int64_t end = checkpoint.tensor_count * (s + 1) / checkpoint.shard_count;
    const Shard shard = DescribeShard(checkpoint, first, end);
    auto begin = static_cast<int64_t>(shard.header.size());
    for (int64_t i = first; i < end; ++i) {
      const int64_t size = ElementsOf(checkpoint, i) * 2;
      tensors.push_back({TensorName(i), BenchShardPath(folder, checkpoint, s), begin, size});
      begin += size;
    }
  }
  std::sort(tensors.begin(), tensors.end(), [](const BenchTensor& a, const BenchTensor& b) { return a.name < b.name; });
  return tensors;
}

}  // namespace weightbroker::bench
