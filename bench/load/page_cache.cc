#include "bench/load/page_cache.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <filesystem>
#include <span>

#include "absl/strings/str_cat.h"
#include "bench/bench_support.h"
#include "bench/load/parallel.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/unique_fd.h"

namespace weightbroker::bench {
namespace {

constexpr int64_t kChunkBytes = 4 << 20;
constexpr int kWarmTries = 3;

absl::Status ReadThrough(const std::string& path, std::span<std::byte> buffer) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return SystemError(absl::StrCat("opening ", path), errno);
  for (int64_t at = 0;;) {
    const ssize_t got = pread(fd.get(), buffer.data(), buffer.size(), at);
    if (got < 0) return SystemError(absl::StrCat("reading ", path), errno);
    if (got == 0) return absl::OkStatus();
    at += got;
  }
}

absl::Status Warm(const std::string& path) {
  const auto size = static_cast<int64_t>(std::filesystem::file_size(path));
  ASSIGN_OR_RETURN(int64_t cached, CachedBytes(path));
  // A direct read that the sample before has left behind may still drop some pages.
  for (int tries = 0; cached < size && tries < kWarmTries; ++tries) {
    const Buffers buffer({.count = 1, .size_bytes = kChunkBytes});
    RETURN_IF_ERROR(ReadThrough(path, buffer[0]));
    ASSIGN_OR_RETURN(cached, CachedBytes(path));
  }
  if (cached >= size) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(path, ": only ", cached, " of ", size,
                                                    " bytes stay in the page cache; has the machine the memory?"));
}

}  // namespace

const char* NameOf(CacheState state) {
  switch (state) {
    case CacheState::kCold:
      return "cold";
    case CacheState::kWarm:
      return "warm";
    case CacheState::kMemory:
      return "memory";
  }
  return "";
}

absl::Status PreparePageCache(CacheState state, const std::vector<std::string>& files) {
  for (const std::string& path : files) {
    if (state == CacheState::kCold) RETURN_IF_ERROR(EvictFromPageCache(path));
    if (state == CacheState::kWarm) RETURN_IF_ERROR(Warm(path));
  }
  return absl::OkStatus();
}

bool IsInMemory(const std::string& folder) {
  struct statfs status {};
  if (statfs(folder.c_str(), &status) != 0) return false;
  return status.f_type == TMPFS_MAGIC || status.f_type == RAMFS_MAGIC;
}

}  // namespace weightbroker::bench
