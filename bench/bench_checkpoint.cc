#include "bench/bench_checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/synthetic/checkpoint_draft.h"

namespace weightbroker::bench {
namespace {

constexpr char kStampName[] = "bench_checkpoint.json";

// What the folder was made from; written last, so that a half-written folder has none.
std::string StampOf(const BenchCheckpoint& checkpoint) {
  return nlohmann::json({{"total_bytes", checkpoint.total_bytes},
                         {"tensor_count", checkpoint.tensor_count},
                         {"shard_count", checkpoint.shard_count},
                         {"has_holes", checkpoint.has_holes},
                         {"format", 3}})
      .dump();
}

std::string ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

int64_t ElementsOf(const BenchCheckpoint& checkpoint, int64_t tensor) {
  const int64_t elements = checkpoint.total_bytes / 2;
  const int64_t rest = elements % checkpoint.tensor_count;
  return elements / checkpoint.tensor_count + (tensor < rest ? 1 : 0);
}

CheckpointDraft DraftOf(const BenchCheckpoint& checkpoint) {
  std::vector<TensorDraft> tensors;
  for (int64_t i = 0; i < checkpoint.tensor_count; ++i) {
    tensors.push_back({absl::StrCat("model.layers.", i, ".weight"), "BF16", {ElementsOf(checkpoint, i)}});
  }
  CheckpointDraft draft;
  draft.config = {{"architectures", {"BenchModel"}}, {"model_type", "bench"}, {"torch_dtype", "bfloat16"}};
  DivideIntoShards(tensors, checkpoint.shard_count, 0, &draft);
  return draft;
}

}  // namespace

std::string BenchShardPath(const std::string& folder, const BenchCheckpoint& checkpoint, int64_t index) {
  return absl::StrCat(folder, "/", ShardFileName(index, checkpoint.shard_count));
}

absl::Status WriteBenchCheckpoint(const std::string& folder, const BenchCheckpoint& checkpoint) {
  const std::string stamp_path = absl::StrCat(folder, "/", kStampName);
  const std::string stamp_there = ReadText(stamp_path);
  if (stamp_there == StampOf(checkpoint)) return absl::OkStatus();
  std::error_code error;
  if (!stamp_there.empty()) std::filesystem::remove_all(folder, error);  // it is ours
  const WriteOptions options{.sparse = checkpoint.has_holes, .sparse_head_bytes = kHolePageBytes};
  RETURN_IF_ERROR(WriteCheckpoint(DraftOf(checkpoint), folder, options));
  std::ofstream stamp(stamp_path, std::ios::binary | std::ios::trunc);
  stamp << StampOf(checkpoint);
  stamp.close();
  return stamp ? absl::OkStatus() : absl::InternalError(absl::StrCat("cannot write ", stamp_path));
}

std::vector<BenchTensor> ListBenchTensors(const std::string& folder, const BenchCheckpoint& checkpoint) {
  std::vector<BenchTensor> tensors;
  for (const ShardDraft& shard : DraftOf(checkpoint).shards) {
    int64_t begin = HeaderBytes(shard);
    for (const TensorDraft& tensor : shard.tensors) {
      tensors.push_back({tensor.name, absl::StrCat(folder, "/", shard.name), begin, tensor.size_bytes()});
      begin += tensor.size_bytes();
    }
  }
  std::sort(tensors.begin(), tensors.end(), [](const BenchTensor& a, const BenchTensor& b) { return a.name < b.name; });
  return tensors;
}

}  // namespace weightbroker::bench
