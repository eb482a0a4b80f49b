#include "bench/bench_support.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <fstream>
#include <sstream>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/unique_fd.h"

namespace weightbroker::bench {
namespace {

double NearestRank(const std::vector<double>& sorted, double fraction) {
  const auto rank = static_cast<size_t>(std::ceil(fraction * static_cast<double>(sorted.size())));
  return sorted[std::clamp<size_t>(rank, 1, sorted.size()) - 1];
}

// The value of a line "key : value" or "key: value" of a /proc file; empty if it has none.
std::string ValueInProcFile(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos || line.compare(0, key.size(), key) != 0) continue;
    const size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

std::string FirstLine(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string Compiler() {
#if defined(__clang__)
  return absl::StrCat("clang ", __clang_major__, ".", __clang_minor__, ".", __clang_patchlevel__);
#else
  return absl::StrCat("gcc ", __GNUC__, ".", __GNUC_MINOR__, ".", __GNUC_PATCHLEVEL__);
#endif
}

absl::StatusOr<UniqueFd> OpenForReading(const std::string& path) {
  UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return SystemError(absl::StrCat("open ", path), errno);
  return fd;
}

}  // namespace

Summary Summarize(std::vector<double> samples) {
  std::vector<double> sorted = samples;
  std::sort(sorted.begin(), sorted.end());
  const size_t middle = sorted.size() / 2;
  Summary summary;
  summary.median = sorted.size() % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
  summary.p90 = NearestRank(sorted, 0.90);
  summary.p99 = NearestRank(sorted, 0.99);
  summary.least = sorted.front();
  summary.greatest = sorted.back();
  summary.samples = std::move(samples);
  return summary;
}

nlohmann::json ToJson(const Summary& summary) {
  return {{"median", summary.median}, {"p90", summary.p90},           {"p99", summary.p99},
          {"least", summary.least},   {"greatest", summary.greatest}, {"samples", summary.samples}};
}

nlohmann::json DescribeMachine() {
  utsname name{};
  uname(&name);
  return {{"processor", ValueInProcFile("/proc/cpuinfo", "model name")},
          {"cores", std::thread::hardware_concurrency()},
          {"memory", ValueInProcFile("/proc/meminfo", "MemTotal")},
          {"kernel", absl::StrCat(name.sysname, " ", name.release, " ", name.machine)},
          {"transparent_hugepage", FirstLine("/sys/kernel/mm/transparent_hugepage/enabled")},
          {"transparent_hugepage_shmem", FirstLine("/sys/kernel/mm/transparent_hugepage/shmem_enabled")},
          {"compiler", Compiler()},
          {"build_type", WEIGHTBROKER_BUILD_TYPE},
          {"version", WEIGHTBROKER_VERSION}};
}

double NowSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string Digits(double seconds) {
  char text[64];
  snprintf(text, sizeof(text), "%.9f", seconds);
  return text;
}

absl::StatusOr<int64_t> CachedBytes(const std::string& path) {
  ASSIGN_OR_RETURN(const UniqueFd fd, OpenForReading(path));
  struct stat status {};
  if (fstat(fd.get(), &status) != 0) return SystemError(absl::StrCat("fstat ", path), errno);
  if (status.st_size == 0) return 0;
  const auto size = static_cast<size_t>(status.st_size);
  void* const mapping = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (mapping == MAP_FAILED) return SystemError(absl::StrCat("mmap ", path), errno);
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> present((size + page - 1) / page);
  const int result = mincore(mapping, size, present.data());
  const int error_number = errno;
  munmap(mapping, size);
  if (result != 0) return SystemError(absl::StrCat("mincore ", path), error_number);
  const auto count =
      std::count_if(present.begin(), present.end(), [](unsigned char flags) { return (flags & 1) != 0; });
  return static_cast<int64_t>(count) * static_cast<int64_t>(page);
}

absl::Status EvictFromPageCache(const std::string& path) {
  ASSIGN_OR_RETURN(const UniqueFd fd, OpenForReading(path));
  if (fdatasync(fd.get()) != 0) return SystemError(absl::StrCat("fdatasync ", path), errno);
  if (const int error = posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED); error != 0) {
    return SystemError(absl::StrCat("posix_fadvise ", path), error);
  }
  ASSIGN_OR_RETURN(const int64_t cached, CachedBytes(path));
  if (cached == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(path, ": ", cached, " bytes stay in the page cache; is the file mapped by another process?"));
}

}  // namespace weightbroker::bench
