#include "client/tool/format.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/quote.h"

namespace weightbroker::tool {

std::string FormatBytes(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  if (bytes < 10 * 1024) return absl::StrCat(bytes, " B");
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string FormatSeconds(double seconds) {
  if (seconds < 60) return absl::StrFormat("%.3f s", seconds);
  const auto whole = static_cast<int64_t>(seconds);
  return absl::StrFormat("%d min %d s", whole / 60, whole % 60);
}

std::string FormatCount(int64_t count, const std::string& noun) {
  return absl::StrCat(count, " ", noun, count == 1 ? "" : "s");
}

std::string FormatTable(std::vector<std::vector<std::string>> rows) {
  for (auto& row : rows) {
    for (std::string& cell : row) cell = OneLine(cell);
  }
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string table;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i)
      absl::StrAppend(&line, row[i], std::string(widths[i] - row[i].size() + 2, ' '));
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&table, line, "\n");
  }
  return table;
}

std::string FormatBar(int64_t done, int64_t total, int width) {
  if (total <= 0) return "";
  const double part = std::clamp(static_cast<double>(done) / static_cast<double>(total), 0.0, 1.0);
  const int marks = static_cast<int>(part * width);
  return absl::StrFormat("[%s%s] %3d %%", std::string(static_cast<size_t>(marks), '#'),
                         std::string(static_cast<size_t>(width - marks), '.'), static_cast<int>(part * 100));
}

std::string FormatSecondsLeft(double seconds) {
  const auto whole = static_cast<int64_t>(std::ceil(std::clamp(seconds, 1.0, 1e9)));
  if (whole < 60) return absl::StrCat(whole, " s");
  if (whole < 3600) return absl::StrFormat("%d min %02d s", whole / 60, whole % 60);
  return absl::StrFormat("%d h %02d min", whole / 3600, whole % 3600 / 60);
}

}  // namespace weightbroker::tool
