#include "common/memory/host_memory.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

namespace weightbroker {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::optional<int64_t> ParseNumber(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<int64_t> ReadNumber(const std::string& path) { return ParseNumber(FirstLine(path)); }

// The value of the line "<key> <number> ..." of a file such as /proc/meminfo or memory.stat.
std::optional<int64_t> ReadKeyedNumber(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    int64_t value = 0;
    if (words >> name >> value && name == key) return value;
  }
  return std::nullopt;
}

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

// Where one version of the memory controller is mounted, what that mount shows of the hierarchy, and how its files are
// called. Reclaimable page cache is on the file lists; tmpfs pages are not, as they have nowhere to go.
struct Controller {
  bool is_v2 = false;
  std::string mount_point;
  std::string mount_root;
};

const char* LimitFile(const Controller& controller) {
  return controller.is_v2 ? "memory.max" : "memory.limit_in_bytes";
}
const char* UsageFile(const Controller& controller) {
  return controller.is_v2 ? "memory.current" : "memory.usage_in_bytes";
}
const char* InactiveFileKey(const Controller& controller) {
  return controller.is_v2 ? "inactive_file" : "total_inactive_file";
}
const char* ActiveFileKey(const Controller& controller) {
  return controller.is_v2 ? "active_file" : "total_active_file";
}

// From a line of /proc/self/mountinfo: "36 35 98:0 /root /mount/point options [optional ...] - type source
// super_options".
std::optional<Controller> ParseMount(const std::string& line) {
  const std::vector<std::string> fields = Split(line, ' ');
  const auto dash = std::find(fields.begin(), fields.end(), "-");
  if (fields.size() < 6 || fields.end() - dash < 4) return std::nullopt;
  Controller controller{.is_v2 = *(dash + 1) == "cgroup2", .mount_point = fields[4], .mount_root = fields[3]};
  if (controller.is_v2) return controller;
  const std::vector<std::string> options = Split(*(dash + 3), ',');
  const bool is_memory = std::find(options.begin(), options.end(), "memory") != options.end();
  if (*(dash + 1) != "cgroup" || !is_memory) return std::nullopt;
  return controller;
}

// This process's path in the controller's hierarchy, from a line "<id>:<controllers>:<path>" of /proc/self/cgroup.
std::string OwnPath(const std::string& root, const Controller& controller) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::vector<std::string> names = Split(line.substr(first + 1, second - first - 1), ',');
    const bool is_memory = std::find(names.begin(), names.end(), "memory") != names.end();
    if (controller.is_v2 ? names.empty() : is_memory) return line.substr(second + 1);
  }
  return "/";
}

// What the cgroup in `folder` still allows; kNoLimit if it has no limit.
int64_t AllowedIn(const std::string& folder, const Controller& controller) {
  const auto limit = ReadNumber(folder + "/" + LimitFile(controller));  // "max" is no number
  const auto usage = ReadNumber(folder + "/" + UsageFile(controller));
  if (!limit.has_value() || !usage.has_value()) return kNoLimit;
  const std::string stat = folder + "/memory.stat";
  const int64_t reclaimable = ReadKeyedNumber(stat, InactiveFileKey(controller)).value_or(0) +
                              ReadKeyedNumber(stat, ActiveFileKey(controller)).value_or(0);
  return std::max<int64_t>(0, *limit - std::max<int64_t>(0, *usage - reclaimable));
}

// What the cgroup in `folder` is limited to; kNoLimit if it has no limit.
int64_t LimitOf(const std::string& folder, const Controller& controller) {
  return ReadNumber(folder + "/" + LimitFile(controller)).value_or(kNoLimit);
}

// The least that `ask` says of this process's cgroup and those above it. In a container the mount shows the hierarchy
// from the container's own cgroup on, and the path may be the host's: then the mount point is what there is to see.
int64_t LeastOf(int64_t (*ask)(const std::string&, const Controller&), const std::string& root,
                const Controller& controller) {
  std::string path = OwnPath(root, controller);
  const std::string& shown_from = controller.mount_root;
  if (shown_from != "/") {
    const bool is_below = path == shown_from || path.rfind(shown_from + "/", 0) == 0;
    path = is_below ? path.substr(shown_from.size()) : "";
  }
  while (!path.empty() && path.back() == '/') path.pop_back();
  int64_t least = ask(root + controller.mount_point, controller);
  while (!path.empty()) {
    least = std::min(least, ask(root + controller.mount_point + path, controller));
    path.resize(path.rfind('/'));
  }
  return least;
}

// The word in brackets: "always [madvise] never" -> "madvise".
std::string ChosenWord(const std::string& line) {
  const size_t open = line.find('[');
  const size_t close = line.find(']');
  return open == std::string::npos || close == std::string::npos ? "" : line.substr(open + 1, close - open - 1);
}

// What the system says of transparent huge pages in shared memory.
std::string HugePagePolicy(const std::string& root) {
  const std::string folder = root + "/sys/kernel/mm/transparent_hugepage/";
  // Kernels from 6.11 on have a setting for each size, which may say "inherit".
  std::string word = ChosenWord(FirstLine(folder + "hugepages-2048kB/shmem_enabled"));
  if (word.empty() || word == "inherit") word = ChosenWord(FirstLine(folder + "shmem_enabled"));
  return word;
}

bool AllowsTransparentHugePages(const std::string& root) {
  return HugePagePolicy(root) == "advise" || WritesTakeHugePages(root);
}

int64_t FreeHugePageBytes(const std::string& root) {
  const std::string folder = root + "/sys/kernel/mm/hugepages/hugepages-2048kB/";
  const int64_t free = ReadNumber(folder + "free_hugepages").value_or(0);
  const int64_t promised = ReadNumber(folder + "resv_hugepages").value_or(0);
  return std::max<int64_t>(0, free - promised) * kHugePageBytes;
}

}  // namespace

HostMemory ReadHostMemory(const std::string& root) {
  HostMemory memory{.available_bytes = ReadKeyedNumber(root + "/proc/meminfo", "MemAvailable:").value_or(0) * 1024,
                    .limited_by = "machine",
                    .free_huge_page_bytes = FreeHugePageBytes(root)};
  std::ifstream mounts(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    const auto controller = ParseMount(line);
    if (!controller.has_value()) continue;
    const int64_t allowed = LeastOf(AllowedIn, root, *controller);
    if (allowed >= memory.available_bytes) continue;
    memory.available_bytes = allowed;
    memory.limited_by = "cgroup";
  }
  return memory;
}

int64_t ReadHostMemoryTotal(const std::string& root) {
  int64_t total_bytes = ReadKeyedNumber(root + "/proc/meminfo", "MemTotal:").value_or(0) * 1024;
  std::ifstream mounts(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    const auto controller = ParseMount(line);
    if (controller.has_value()) total_bytes = std::min(total_bytes, LeastOf(LimitOf, root, *controller));
  }
  return total_bytes;
}

bool WritesTakeHugePages(const std::string& root) {
  const std::string policy = HugePagePolicy(root);
  return policy == "always" || policy == "within_size" || policy == "force";
}

v1::PageKind ProbeHostPageKind(int64_t size_bytes, const std::string& root) {
  if (size_bytes < kHugePageBytes) return v1::PAGE_KIND_BASE;
  if (size_bytes <= FreeHugePageBytes(root)) return v1::PAGE_KIND_HUGETLB;
  if (AllowsTransparentHugePages(root)) return v1::PAGE_KIND_TRANSPARENT_HUGE;
  return v1::PAGE_KIND_BASE;
}

}  // namespace weightbroker
