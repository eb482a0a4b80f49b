#include "bench/load/plain_read.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/bench_support.h"
#include "bench/load/parallel.h"
#include "bench/load/usage.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/unique_fd.h"
#include "common/checkpoint/checkpoint.h"
#include "common/memory/digest.h"

namespace weightbroker::bench {
namespace {

constexpr size_t kCallBytes = 16 << 20;

// Ends with the process.
absl::StatusOr<std::span<std::byte>> ReadIntoMemory(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return SystemError(absl::StrCat("opening ", path), errno);
  const size_t size = std::filesystem::file_size(path);
  void* const memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return SystemError("mmap", errno);
  madvise(memory, size, MADV_HUGEPAGE);
  const std::span<std::byte> bytes(static_cast<std::byte*>(memory), size);
  for (size_t at = 0; at < size;) {
    const ssize_t got = read(fd.get(), bytes.data() + at, std::min(kCallBytes, size - at));
    if (got <= 0) return SystemError(absl::StrCat("reading ", path), got < 0 ? errno : EIO);
    at += static_cast<size_t>(got);
  }
  return bytes;
}

absl::StatusOr<DigestsByName> DigestFiles(const Checkpoint& checkpoint,
                                          const std::vector<std::span<const std::byte>>& files) {
  std::vector<std::string> digests(checkpoint.tensors.size());
  const Buffers none({.count = CoreCount(), .size_bytes = 1});
  RETURN_IF_ERROR(ForEachInParallel(static_cast<int64_t>(digests.size()), none, [&](int64_t i, std::span<std::byte>) {
    const CheckpointTensor& tensor = checkpoint.tensors[static_cast<size_t>(i)];
    digests[static_cast<size_t>(i)] = DigestHex(ComputeDigest(files[static_cast<size_t>(tensor.file_index)].subspan(
        static_cast<size_t>(tensor.offset_bytes), static_cast<size_t>(tensor.size_bytes))));
    return absl::OkStatus();
  }));
  DigestsByName named;
  for (size_t i = 0; i < digests.size(); ++i) named[checkpoint.tensors[i].name] = digests[i];
  return named;
}

absl::Status WriteDigests(const Task& task, const std::vector<std::span<std::byte>>& files) {
  ASSIGN_OR_RETURN(const Checkpoint checkpoint, OpenCheckpoint(RealFileSystem(), task.folder));
  const std::vector<std::span<const std::byte>> bytes(files.begin(), files.end());
  ASSIGN_OR_RETURN(const DigestsByName digests, DigestFiles(checkpoint, bytes));
  std::ofstream(task.digests) << nlohmann::json(digests);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<nlohmann::ordered_json> PlainRead(const Task& task) {
  const OwnUsage meter;
  const double ready = NowSeconds();
  std::vector<std::span<std::byte>> files;
  int64_t bytes = 0;
  for (const std::string& path : task.files) {
    ASSIGN_OR_RETURN(files.emplace_back(), ReadIntoMemory(path));
    bytes += static_cast<int64_t>(files.back().size());
  }
  const double end = NowSeconds();
  nlohmann::ordered_json result = meter.Finish();
  result["load_seconds"] = end - ready;
  result["exec_seconds"] = end - task.started_at;
  result["bytes"] = bytes;
  if (!task.digests.empty()) RETURN_IF_ERROR(WriteDigests(task, files));
  return result;
}

absl::StatusOr<DigestsByName> ReadDigestsFile(const std::string& path) {
  std::ifstream file(path);
  const nlohmann::json json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return absl::InternalError(absl::StrCat(path, " has no digests"));
  return json.get<DigestsByName>();
}

absl::StatusOr<DigestsByName> ReferenceDigests(const std::string& folder) {
  ASSIGN_OR_RETURN(const Checkpoint checkpoint, OpenCheckpoint(RealFileSystem(), folder));
  std::vector<std::span<const std::byte>> files;
  std::vector<std::pair<void*, size_t>> mappings;
  for (const std::string& name : checkpoint.files.shard_names) {
    const std::string path = absl::StrCat(checkpoint.files.folder, "/", name);
    const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    const size_t size = std::filesystem::file_size(path);
    void* const data = fd.valid() ? mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0) : MAP_FAILED;
    if (data == MAP_FAILED) return SystemError(absl::StrCat("mapping ", path), errno);
    mappings.emplace_back(data, size);
    files.emplace_back(static_cast<const std::byte*>(data), size);
  }
  absl::StatusOr<DigestsByName> digests = DigestFiles(checkpoint, files);
  for (const auto& [data, size] : mappings) munmap(data, size);
  return digests;
}

}  // namespace weightbroker::bench
