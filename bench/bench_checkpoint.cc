#include "bench/bench_checkpoint.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/stamped_folder.h"
#include "common/synthetic/checkpoint_draft.h"

namespace weightbroker::bench {
namespace {

// What the folder was made from.
std::string StampOf(const BenchCheckpoint& checkpoint) {
  return nlohmann::json({{"total_bytes", checkpoint.total_bytes},
                         {"tensor_count", checkpoint.tensor_count},
                         {"shard_count", checkpoint.shard_count},
                         {"has_holes", checkpoint.has_holes},
                         {"format", 3}})
      .dump();
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
  const WriteOptions options{.sparse = checkpoint.has_holes, .sparse_head_bytes = kHolePageBytes};
  return FillFolderOnce(folder, StampOf(checkpoint),
                        [&] { return WriteCheckpoint(DraftOf(checkpoint), folder, options); });
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
