#include "bench/load/ceilings.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <set>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/bench_support.h"
#include "bench/load/parallel.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/unique_fd.h"
#include "common/memory/host_slab.h"

namespace weightbroker::bench {
namespace {

constexpr int64_t kMiB = 1 << 20;

nlohmann::ordered_json Timed(double start, int64_t bytes) {
  return {{"seconds", NowSeconds() - start}, {"bytes", bytes}};
}

int64_t BytesOf(const std::vector<FileRun>& runs) {
  int64_t bytes = 0;
  for (const FileRun& run : runs) bytes += run.size_bytes;
  return bytes;
}

Buffers BuffersOf(const Task& task) {
  return Buffers({.count = task.threads, .size_bytes = task.chunk_bytes, .huge_pages = task.huge_pages});
}

int64_t ChunkCount(const Task& task) { return (task.bytes + task.chunk_bytes - 1) / task.chunk_bytes; }

// Of chunk `i` of memory that is filled.
int64_t ChunkBytes(const Task& task, int64_t i) {
  return std::min(task.chunk_bytes, task.bytes - i * task.chunk_bytes);
}

class Mapping {
 public:
  static absl::StatusOr<Mapping> Open(const std::string& path) {
    const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd.valid()) return SystemError(absl::StrCat("opening ", path), errno);
    const size_t size = std::filesystem::file_size(path);
    void* const data = mmap(nullptr, size, PROT_READ, MAP_SHARED | MAP_POPULATE, fd.get(), 0);
    if (data == MAP_FAILED) return SystemError(absl::StrCat("mapping ", path), errno);
    return Mapping(static_cast<const std::byte*>(data));
  }
  const std::byte* data() const { return data_; }

 private:
  explicit Mapping(const std::byte* data) : data_(data) {}

  const std::byte* data_;  // unmapped with the process
};

}  // namespace

absl::StatusOr<std::vector<FileRun>> DivideFiles(const Task& task) {
  int64_t left = task.bytes > 0 ? task.bytes : INT64_MAX;
  std::vector<FileRun> runs;
  for (size_t f = 0; f < task.files.size(); ++f) {
    std::error_code error;
    const auto size = static_cast<int64_t>(std::filesystem::file_size(task.files[f], error));
    if (error) return SystemError(task.files[f], error.value());
    for (int64_t at = 0; at < size && left > 0; at += task.chunk_bytes) {
      const int64_t length = std::min(task.chunk_bytes, size - at);
      runs.push_back({static_cast<int>(f), at, length});
      left -= length;
    }
  }
  return runs;
}

absl::StatusOr<nlohmann::ordered_json> ReadWithPread(const Task& task) {
  ASSIGN_OR_RETURN(const std::vector<FileRun> runs, DivideFiles(task));
  std::vector<UniqueFd> files;
  for (const std::string& path : task.files) {
    files.emplace_back(open(path.c_str(), O_RDONLY | O_CLOEXEC | (task.direct ? O_DIRECT : 0)));
    if (!files.back().valid()) return SystemError(absl::StrCat("opening ", path), errno);
  }
  const Buffers buffers = BuffersOf(task);
  const double start = NowSeconds();
  RETURN_IF_ERROR(ForEachInParallel(
      static_cast<int64_t>(runs.size()), buffers, [&](int64_t i, std::span<std::byte> buffer) -> absl::Status {
        const FileRun& run = runs[static_cast<size_t>(i)];
        const int fd = files[static_cast<size_t>(run.file)].get();
        const ssize_t got = pread(fd, buffer.data(), buffer.size(), run.offset_bytes);
        return got == run.size_bytes ? absl::OkStatus() : SystemError("pread", got < 0 ? errno : EIO);
      }));
  return Timed(start, BytesOf(runs));
}

absl::StatusOr<nlohmann::ordered_json> CopyFromMapping(const Task& task) {
  ASSIGN_OR_RETURN(const std::vector<FileRun> runs, DivideFiles(task));
  std::vector<Mapping> mappings;
  for (const std::string& path : task.files) {
    ASSIGN_OR_RETURN(Mapping mapping, Mapping::Open(path));
    mappings.push_back(mapping);
  }
  const Buffers buffers = BuffersOf(task);
  const double start = NowSeconds();
  RETURN_IF_ERROR(ForEachInParallel(
      static_cast<int64_t>(runs.size()), buffers, [&](int64_t i, std::span<std::byte> buffer) -> absl::Status {
        const FileRun& run = runs[static_cast<size_t>(i)];
        std::memcpy(buffer.data(), mappings[static_cast<size_t>(run.file)].data() + run.offset_bytes,
                    static_cast<size_t>(run.size_bytes));
        return absl::OkStatus();
      }));
  return Timed(start, BytesOf(runs));
}

// The pages are allocated in one call for each chunk, then written.
absl::StatusOr<nlohmann::ordered_json> FillMapping(const Task& task) {
  const Buffers buffers = BuffersOf(task);
  const double start = NowSeconds();
  ASSIGN_OR_RETURN(HostSlab slab, HostSlab::Create(task.bytes));
  const auto fill = [&](int64_t i, std::span<std::byte> buffer) -> absl::Status {
    const int64_t at = i * task.chunk_bytes;
    const int64_t length = ChunkBytes(task, i);
    RETURN_IF_ERROR(slab.Populate(at, length));
    std::memcpy(slab.writable_bytes().data() + at, buffer.data(), static_cast<size_t>(length));
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(ForEachInParallel(ChunkCount(task), buffers, fill));
  return Timed(start, task.bytes);
}

// The kernel need not clear the pages first. Into as many memfds as there are threads: each takes one writer at a time.
absl::StatusOr<nlohmann::ordered_json> WriteMemfds(const Task& task) {
  const Buffers buffers = BuffersOf(task);
  const double start = NowSeconds();
  std::vector<UniqueFd> fds;
  for (int i = 0; i < task.threads; ++i) {
    const UniqueFd& fd = fds.emplace_back(memfd_create("bench", MFD_CLOEXEC));
    if (!fd.valid() || ftruncate(fd.get(), task.bytes) != 0) return SystemError("memfd_create", errno);
  }
  RETURN_IF_ERROR(
      ForEachInParallel(ChunkCount(task), buffers, [&](int64_t i, std::span<std::byte> buffer) -> absl::Status {
        const auto length = static_cast<size_t>(ChunkBytes(task, i));
        const int fd = fds[static_cast<size_t>(i % task.threads)].get();
        const ssize_t written = pwrite(fd, buffer.data(), length, i * task.chunk_bytes);
        return written == static_cast<ssize_t>(length) ? absl::OkStatus() : SystemError("pwrite", errno);
      }));
  return Timed(start, task.bytes);
}

std::vector<Task> ReadMethods(const std::vector<std::string>& files, int64_t bytes, bool direct) {
  const std::set<int> threads = direct ? std::set<int>{1, 4, 8, 16} : std::set<int>{1, CoreCount(), 2 * CoreCount()};
  std::vector<Task> methods;
  for (const int count : threads) {
    for (const int64_t chunk : direct ? std::array{2 * kMiB, 8 * kMiB} : std::array{kMiB, 4 * kMiB}) {
      methods.push_back({.kind = "read_pread",
                         .files = files,
                         .bytes = bytes,
                         .threads = count,
                         .chunk_bytes = chunk,
                         .direct = direct});
    }
  }
#ifdef WEIGHTBROKER_BENCH_URING
  if (!direct) return methods;  // from the page cache it copies in the kernel's own threads, one for each request
  for (const int depth : {8, 32}) {
    for (const int64_t chunk : {kMiB, 4 * kMiB}) {
      methods.push_back({.kind = "read_uring",
                         .files = files,
                         .bytes = bytes,
                         .threads = 1,
                         .depth = depth,
                         .chunk_bytes = chunk,
                         .direct = true});
    }
  }
#endif
  return methods;
}

std::vector<Task> CopyMethods(const std::vector<std::string>& files, int64_t bytes) {
  std::vector<Task> methods;
  for (const int count : std::set<int>{1, CoreCount()}) {
    methods.push_back(
        {.kind = "copy", .files = files, .bytes = bytes, .threads = count, .chunk_bytes = kMiB, .direct = false});
  }
  return methods;
}

std::vector<Task> FillMethods(int64_t bytes) {
  std::vector<Task> methods;
  for (const char* const kind : {"fill", "write"}) {
    for (const int count : std::set<int>{1, CoreCount()}) {
      methods.push_back({.kind = kind, .bytes = bytes, .threads = count, .chunk_bytes = 4 * kMiB});
    }
  }
  return methods;
}

}  // namespace weightbroker::bench
