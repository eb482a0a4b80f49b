#include "server/broker/process_metrics.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>

#include "server/broker/metric_family.h"

namespace weightbroker {
namespace {

// Fields of /proc/self/stat after the command's name, which may hold blanks and parentheses, counted from 3 as proc(5)
// does.
struct Stat {
  double user_ticks = 0;      // 14
  double system_ticks = 0;    // 15
  double threads = 0;         // 20
  double start_ticks = 0;     // 22, since the machine's start
  double virtual_bytes = 0;   // 23
  double resident_pages = 0;  // 24
};

std::optional<Stat> ReadStat() {
  std::ifstream file("/proc/self/stat");
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(name_end + 1));
  Stat stat;
  std::string field;
  for (int number = 3; number <= 24; ++number) {
    if (!(fields >> field)) return std::nullopt;
    const double value = number == 3 ? 0 : std::strtod(field.c_str(), nullptr);
    if (number == 14) stat.user_ticks = value;
    if (number == 15) stat.system_ticks = value;
    if (number == 20) stat.threads = value;
    if (number == 22) stat.start_ticks = value;
    if (number == 23) stat.virtual_bytes = value;
    if (number == 24) stat.resident_pages = value;
  }
  return stat;
}

// The machine's start in seconds since the epoch.
std::optional<double> ReadBootTime() {
  std::ifstream file("/proc/stat");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("btime ", 0) == 0) return std::strtod(line.c_str() + 6, nullptr);
  }
  return std::nullopt;
}

std::optional<int64_t> CountOpenFiles() {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc/self/fd"), closedir);
  if (folder == nullptr) return std::nullopt;
  int64_t count = 0;
  while (readdir(folder.get()) != nullptr) ++count;
  return count - 3;  // ".", "..", and the folder itself
}

}  // namespace

void AddProcessMetrics(std::vector<prometheus::MetricFamily>* families) {
  const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  if (const auto stat = ReadStat(); stat.has_value()) {
    AddFamily(MetricId::kProcessCpuSeconds, families).Add((stat->user_ticks + stat->system_ticks) / ticks);
    AddFamily(MetricId::kProcessThreads, families).Add(stat->threads);
    AddFamily(MetricId::kProcessVirtualBytes, families).Add(stat->virtual_bytes);
    AddFamily(MetricId::kProcessResidentBytes, families)
        .Add(stat->resident_pages * static_cast<double>(sysconf(_SC_PAGESIZE)));
    if (const auto boot = ReadBootTime(); boot.has_value()) {
      AddFamily(MetricId::kProcessStartTime, families).Add(*boot + stat->start_ticks / ticks);
    }
  }
  if (const auto open = CountOpenFiles(); open.has_value()) {
    AddFamily(MetricId::kProcessOpenFds, families).Add(static_cast<double>(*open));
  }
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    AddFamily(MetricId::kProcessMaxFds, families).Add(static_cast<double>(limit.rlim_cur));
  }
}

}  // namespace weightbroker
