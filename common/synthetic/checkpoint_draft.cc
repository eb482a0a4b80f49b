#include "common/synthetic/checkpoint_draft.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/unique_fd.h"
#include "common/checkpoint/dtype.h"
#include "common/synthetic/contents.h"

namespace weightbroker {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr int64_t kPieceBytes = 4 << 20;

// A new file that is written from its start to its end.
class NewFile {
 public:
  static absl::StatusOr<NewFile> Create(const std::string& path) {
    UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (!fd.valid()) return SystemError(absl::StrCat("making ", path), errno);
    return NewFile(path, std::move(fd));
  }

  absl::Status Append(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t written = write(fd_.get(), bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) return SystemError(absl::StrCat("writing ", path_), errno);
      bytes = bytes.subspan(static_cast<size_t>(written));
    }
    return absl::OkStatus();
  }
  absl::Status Append(const std::string& text) { return Append(std::as_bytes(std::span(text))); }

  absl::Status AppendHole(int64_t size_bytes) { return Resize(size_bytes); }
  absl::Status CutOff(int64_t size_bytes) { return Resize(-size_bytes); }

 private:
  NewFile(std::string path, UniqueFd fd) : path_(std::move(path)), fd_(std::move(fd)) {}

  absl::Status Resize(int64_t by_bytes) {
    struct stat now {};
    if (fstat(fd_.get(), &now) != 0 || ftruncate(fd_.get(), now.st_size + by_bytes) != 0 ||
        lseek(fd_.get(), 0, SEEK_END) < 0) {
      return SystemError(absl::StrCat("resizing ", path_), errno);
    }
    return absl::OkStatus();
  }

  std::string path_;
  UniqueFd fd_;
};

std::string HeaderOf(const ShardDraft& shard) {
  OrderedJson header = {{"__metadata__", {{"format", "pt"}}}};
  int64_t offset = 0;
  for (const TensorDraft& tensor : shard.tensors) {
    const int64_t end = offset + tensor.size_bytes();
    header[tensor.name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  if (shard.edit_header) shard.edit_header(header);
  std::string text = header.dump();
  if (shard.edit_header_text) shard.edit_header_text(text);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = shard.stated_header_bytes.value_or(text.size());
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + text;
}

std::string IndexOf(const CheckpointDraft& draft) {
  const OrderedJson index = {{"metadata", {{"total_size", draft.total_bytes()}}}, {"weight_map", draft.weight_map}};
  return index.dump(2) + "\n";
}

// One folder's files, one after the other. Used once.
class Writer {
 public:
  Writer(const CheckpointDraft& draft, const std::string& folder, const WriteOptions& options)
      : draft_(draft), folder_(folder), options_(options), buffer_(kPieceBytes) {}

  absl::Status Run() {
    RETURN_IF_ERROR(MakeFolder());
    for (const ShardDraft& shard : draft_.shards) RETURN_IF_ERROR(WriteShard(shard));
    if (draft_.has_index) RETURN_IF_ERROR(WriteText(kIndexName, IndexOf(draft_)));
    RETURN_IF_ERROR(WriteText(kConfigName, draft_.config.dump(2) + "\n"));
    for (const auto& [name, text] : draft_.files) {
      if (name != kIndexName && name != kConfigName) RETURN_IF_ERROR(WriteText(name, text));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status MakeFolder() {
    std::error_code error;
    std::filesystem::create_directories(folder_, error);
    if (error) return SystemError(absl::StrCat("making the folder ", folder_), error.value());
    const bool is_empty = std::filesystem::is_empty(folder_, error);
    if (error) return SystemError(absl::StrCat("reading the folder ", folder_), error.value());
    if (is_empty) return absl::OkStatus();
    return MakeError(Reason::kInvalidArgument,
                     absl::StrCat(folder_, " is not empty: name a folder that is, or one to be made"),
                     {{"field", "folder"}, {"folder", folder_}});
  }

  // An empty text in `files` says that the file is not to be there.
  absl::Status WriteText(const std::string& name, const std::string& text) {
    const auto replaced = draft_.files.find(name);
    const std::string& contents = replaced == draft_.files.end() ? text : replaced->second;
    if (contents.empty()) return absl::OkStatus();
    ASSIGN_OR_RETURN(NewFile file, NewFile::Create(folder_ + "/" + name));
    return file.Append(contents);
  }

  absl::Status WriteShard(const ShardDraft& shard) {
    const std::string path = folder_ + "/" + shard.name;
    if (shard.is_absent) return absl::OkStatus();
    if (shard.is_folder) {
      return mkdir(path.c_str(), 0755) == 0 ? absl::OkStatus() : SystemError(absl::StrCat("making ", path), errno);
    }
    ASSIGN_OR_RETURN(NewFile file, NewFile::Create(path));
    if (shard.contents.has_value()) return file.Append(*shard.contents);
    RETURN_IF_ERROR(file.Append(HeaderOf(shard)));
    for (const TensorDraft& tensor : shard.tensors) RETURN_IF_ERROR(WriteTensor(tensor, file));
    if (shard.missing_bytes > 0) RETURN_IF_ERROR(file.CutOff(shard.missing_bytes));
    return file.Append(shard.trailing_bytes);
  }

  absl::Status WriteTensor(const TensorDraft& tensor, NewFile& file) {
    const TensorContents contents(options_.seed, tensor.name, *FindDtype(tensor.dtype));
    const int64_t whole_bytes = tensor.size_bytes();
    const int64_t written_bytes = options_.sparse ? std::min(whole_bytes, options_.sparse_head_bytes) : whole_bytes;
    for (int64_t offset = 0; offset < written_bytes; offset += kPieceBytes) {
      const auto size = static_cast<size_t>(std::min(kPieceBytes, written_bytes - offset));
      const std::span<std::byte> piece(buffer_.data(), size);
      contents.Fill(offset, piece);
      RETURN_IF_ERROR(file.Append(piece));
      done_bytes_ += static_cast<int64_t>(size);
      if (options_.on_progress) options_.on_progress(done_bytes_);
    }
    return written_bytes < whole_bytes ? file.AppendHole(whole_bytes - written_bytes) : absl::OkStatus();
  }

  const CheckpointDraft& draft_;
  const std::string& folder_;
  const WriteOptions& options_;
  std::vector<std::byte> buffer_;
  int64_t done_bytes_ = 0;
};

}  // namespace

int64_t TensorDraft::size_bytes() const {
  int64_t bits = FindDtype(dtype)->bits;
  for (const int64_t dimension : shape) bits *= dimension;
  return bits / 8;
}

int64_t ShardDraft::data_bytes() const {
  int64_t bytes = 0;
  for (const TensorDraft& tensor : tensors) bytes += tensor.size_bytes();
  return bytes;
}

int64_t CheckpointDraft::tensor_count() const {
  int64_t count = 0;
  for (const ShardDraft& shard : shards) count += static_cast<int64_t>(shard.tensors.size());
  return count;
}

int64_t CheckpointDraft::total_bytes() const {
  int64_t bytes = 0;
  for (const ShardDraft& shard : shards) bytes += shard.data_bytes();
  return bytes;
}

std::string ShardFileName(int64_t index, int64_t count) {
  if (count == 1) return kSingleShardName;
  return absl::StrFormat("model-%05d-of-%05d.safetensors", index + 1, count);
}

void DivideIntoShards(const std::vector<TensorDraft>& tensors, int64_t shard_count, int64_t max_shard_bytes,
                      CheckpointDraft* draft) {
  int64_t left_bytes = 0;
  for (const TensorDraft& tensor : tensors) left_bytes += tensor.size_bytes();
  auto left_tensors = static_cast<int64_t>(tensors.size());
  int64_t left_shards = shard_count;
  int64_t shard_bytes = 0;
  const auto is_full = [&](int64_t next_bytes) {
    if (shard_count == 0) return shard_bytes + next_bytes > max_shard_bytes;
    // Each of the shards that are left has its part of the bytes that are left, and one tensor at least.
    return left_shards > 1 && (shard_bytes * left_shards >= left_bytes + shard_bytes || left_tensors < left_shards);
  };
  draft->shards.clear();
  for (const TensorDraft& tensor : tensors) {
    const bool begins =
        draft->shards.empty() || (!draft->shards.back().tensors.empty() && is_full(tensor.size_bytes()));
    if (begins) {
      if (!draft->shards.empty()) --left_shards;
      draft->shards.emplace_back();
      shard_bytes = 0;
    }
    draft->shards.back().tensors.push_back(tensor);
    shard_bytes += tensor.size_bytes();
    left_bytes -= tensor.size_bytes();
    --left_tensors;
  }
  draft->has_index = draft->shards.size() > 1;
  draft->weight_map.clear();
  for (size_t i = 0; i < draft->shards.size(); ++i) {
    draft->shards[i].name = ShardFileName(static_cast<int64_t>(i), static_cast<int64_t>(draft->shards.size()));
    for (const TensorDraft& tensor : draft->shards[i].tensors) draft->weight_map[tensor.name] = draft->shards[i].name;
  }
}

int64_t HeaderBytes(const ShardDraft& shard) { return static_cast<int64_t>(HeaderOf(shard).size()); }

absl::Status WriteCheckpoint(const CheckpointDraft& draft, const std::string& folder, const WriteOptions& options) {
  return Writer(draft, folder, options).Run();
}

}  // namespace weightbroker
