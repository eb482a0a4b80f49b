#include "bench/load/model_folder.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/load/parallel.h"
#include "bench/stamped_folder.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/unique_fd.h"
#include "common/checkpoint/dtype.h"
#include "common/synthetic/checkpoint_draft.h"
#include "common/synthetic/contents.h"
#include "common/synthetic/model.h"

namespace weightbroker::bench {
namespace {

constexpr int64_t kPieceBytes = 4 << 20;
constexpr int64_t kGB = 1'000'000'000;
constexpr uint64_t kSeed = 1;

// What the folder was made from.
std::string StampOf(const ModelRecipe& recipe) {
  return nlohmann::json(
             {{"bytes", recipe.bytes}, {"tensors", recipe.tensors}, {"files", recipe.files}, {"load_format", 1}})
      .dump();
}

// The widths of a layer: as large as leave room for several.
std::map<std::string, int64_t> LlamaNumbers(int64_t bytes) {
  if (bytes >= int64_t{8} << 30) {  // of Llama 3 with 8 billion parameters
    return {{"hidden_size", 4096},       {"intermediate_size", 14336},
            {"num_attention_heads", 32}, {"num_key_value_heads", 8},
            {"head_dim", 128},           {"vocab_size", 128256}};
  }
  if (bytes >= int64_t{512} << 20) {
    return {{"hidden_size", 2048},      {"intermediate_size", 8192}, {"num_attention_heads", 16},
            {"num_key_value_heads", 8}, {"head_dim", 128},           {"vocab_size", 32000}};
  }
  return {};
}

CheckpointDraft DraftOfEqualTensors(const ModelRecipe& recipe, int64_t files) {
  const int64_t elements = recipe.bytes / 2;
  std::vector<TensorDraft> tensors;
  for (int64_t i = 0; i < recipe.tensors; ++i) {
    const int64_t length = elements / recipe.tensors + (i < elements % recipe.tensors ? 1 : 0);
    tensors.push_back({absl::StrCat("model.layers.", i, ".weight"), "BF16", {length}});
  }
  CheckpointDraft draft;
  draft.config = {{"architectures", {"BenchModel"}}, {"model_type", "bench"}, {"torch_dtype", "bfloat16"}};
  DivideIntoShards(tensors, std::min(files, recipe.tensors), 0, &draft);
  return draft;
}

absl::StatusOr<CheckpointDraft> DraftOf(const ModelRecipe& recipe) {
  const int64_t files =
      recipe.files > 0 ? recipe.files : std::max<int64_t>(2, (recipe.bytes + 5 * kGB - 1) / (5 * kGB));
  if (recipe.tensors > 0) return DraftOfEqualTensors(recipe, files);
  return DraftModel(
      {.model = "llama", .bytes = recipe.bytes, .numbers = LlamaNumbers(recipe.bytes), .shard_count = files});
}

// A run of a tensor's bytes that is written at once.
struct Piece {
  int fd;
  int64_t file_offset_bytes;
  const TensorDraft* tensor;
  int64_t tensor_offset_bytes;
  int64_t size_bytes;
};

void AddPieces(const ShardDraft& shard, int fd, std::vector<Piece>* pieces) {
  int64_t begin = HeaderBytes(shard);
  for (const TensorDraft& tensor : shard.tensors) {
    const int64_t size = tensor.size_bytes();
    for (int64_t at = 0; at < size; at += kPieceBytes) {
      pieces->push_back({fd, begin + at, &tensor, at, std::min(kPieceBytes, size - at)});
    }
    begin += size;
  }
}

absl::Status WritePiece(const Piece& piece, std::span<std::byte> buffer) {
  const std::span<std::byte> bytes = buffer.first(static_cast<size_t>(piece.size_bytes));
  TensorContents(kSeed, piece.tensor->name, *FindDtype(piece.tensor->dtype)).Fill(piece.tensor_offset_bytes, bytes);
  const ssize_t written = pwrite(piece.fd, bytes.data(), bytes.size(), piece.file_offset_bytes);
  return written == static_cast<ssize_t>(bytes.size()) ? absl::OkStatus() : SystemError("writing a model", errno);
}

// Files come first with holes in place of contents, which are then written in any order. The kernel lets one writer at
// a time into a file: neighbours in the order are of different files.
absl::Status FillFiles(const CheckpointDraft& draft, const std::string& folder) {
  std::vector<UniqueFd> files;
  std::vector<std::vector<Piece>> pieces(draft.shards.size());
  size_t most = 0;
  for (size_t s = 0; s < draft.shards.size(); ++s) {
    const std::string path = folder + "/" + draft.shards[s].name;
    files.emplace_back(open(path.c_str(), O_WRONLY | O_CLOEXEC));
    if (!files.back().valid()) return SystemError(absl::StrCat("opening ", path), errno);
    AddPieces(draft.shards[s], files.back().get(), &pieces[s]);
    most = std::max(most, pieces[s].size());
  }
  std::vector<Piece> order;
  for (size_t i = 0; i < most; ++i) {
    for (const auto& of_file : pieces) {
      if (i < of_file.size()) order.push_back(of_file[i]);
    }
  }
  const Buffers buffers({.count = CoreCount(), .size_bytes = kPieceBytes});
  return ForEachInParallel(static_cast<int64_t>(order.size()), buffers, [&](int64_t i, std::span<std::byte> buffer) {
    return WritePiece(order[static_cast<size_t>(i)], buffer);
  });
}

absl::Status Write(const CheckpointDraft& draft, const std::string& folder) {
  RETURN_IF_ERROR(WriteCheckpoint(draft, folder, {.sparse = true}));
  return FillFiles(draft, folder);
}

}  // namespace

absl::StatusOr<ModelFolder> WriteModelFolder(const std::string& path, const ModelRecipe& recipe) {
  ASSIGN_OR_RETURN(const CheckpointDraft draft, DraftOf(recipe));
  RETURN_IF_ERROR(FillFolderOnce(path, StampOf(recipe), [&] { return Write(draft, path); }));
  ModelFolder folder{
      .path = path, .files = {}, .total_bytes = draft.total_bytes(), .tensor_count = draft.tensor_count()};
  for (const ShardDraft& shard : draft.shards) folder.files.push_back(path + "/" + shard.name);
  std::sort(folder.files.begin(), folder.files.end());
  return folder;
}

}  // namespace weightbroker::bench
