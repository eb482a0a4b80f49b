#include "bench/load/report.h"

#include <cstdio>
#include <string>

namespace weightbroker::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kGB = 1e9;
constexpr double kMiB = 1 << 20;

// Of one figure of an arm; nothing where the arm does not have it.
std::string Cell(const Json& arm, const char* figure, double unit) {
  const auto found = arm["figures"].find(figure);
  if (found == arm["figures"].end()) return "";
  char text[32];
  snprintf(text, sizeof(text), "%.2f", (*found)["median"].get<double>() / unit);
  return text;
}

void PrintCeilings(const Json& state) {
  for (const auto& [name, ceiling] : state["ceilings"].items()) {
    const Json& rate = ceiling["bytes_per_second"];
    std::printf("%-24s %9.2f GB/s  (%.2f to %.2f), %s\n", name.c_str(), rate["median"].get<double>() / kGB,
                rate["least"].get<double>() / kGB, rate["greatest"].get<double>() / kGB,
                ceiling["method"].dump().c_str());
  }
}

void PrintArm(const std::string& name, const Json& arm) {
  if (arm.contains("failed")) {
    std::printf("%-24s failed: %.200s\n", name.c_str(), arm["failed"].get<std::string>().c_str());
    return;
  }
  std::printf("%-24s %9.2f %9s %9s %8.1f%% %9s %11s %11s %11s\n", name.c_str(),
              arm["bytes_per_second"]["median"].get<double>() / kGB, Cell(arm, "load_seconds", 1).c_str(),
              Cell(arm, "exec_seconds", 1).c_str(), 100 * arm["share_of_lower_ceiling"].get<double>(),
              Cell(arm, "cpu_seconds", 1).c_str(), Cell(arm, "peak_resident_bytes", kMiB).c_str(),
              Cell(arm, "peak_pinned_bytes", kMiB).c_str(), Cell(arm, "storage_read_bytes", kMiB).c_str());
}

void PrintState(const Json& state) {
  std::printf("\npage cache: %s\n", state["page_cache"].get<std::string>().c_str());
  PrintCeilings(state);
  std::printf("%-24s %9s %9s %9s %9s %9s %11s %11s %11s\n", "arm", "GB/s", "load s", "exec s", "of lower", "CPU s",
              "resident MiB", "pinned MiB", "storage MiB");
  for (const auto& [name, arm] : state["arms"].items()) PrintArm(name, arm);
}

void PrintAbsent(const Json& rivals) {
  if (rivals.contains("absent")) std::printf("no rivals: %.300s\n", rivals["absent"].get<std::string>().c_str());
  for (const auto& [name, found] : rivals["arms"].items()) {
    if (found.contains("version")) std::printf("%s %s\n", name.c_str(), found["version"].get<std::string>().c_str());
    if (found.contains("absent")) std::printf("no %s: %s\n", name.c_str(), found["absent"].get<std::string>().c_str());
  }
}

void PrintScaling(const Json& scaling) {
  for (const char* const table : {"reader_threads", "reads_per_thread", "chunk_bytes", "tensors"}) {
    std::printf("\n%-16s %9s %9s %9s\n", table, "GB/s", "CPU s", "plan s");
    for (const auto& [value, row] : scaling[table].items()) {
      std::printf("%-16s %9.2f %9.2f %9.3f\n", value.c_str(), row["bytes_per_second"]["median"].get<double>() / kGB,
                  row["cpu_seconds"].get<double>(), row["planned_seconds"].get<double>());
    }
  }
}

}  // namespace

void PrintReport(const Json& report) {
  if (report.contains("rivals")) PrintAbsent(report["rivals"]);
  if (report.contains("scaling")) PrintScaling(report["scaling"]);
  if (!report.contains("sizes")) return;
  for (const Json& size : report["sizes"]) {
    std::printf("\n%.2f GB, %lld tensors, %lld files\n", size["bytes"].get<double>() / kGB,
                size["tensors"].get<long long>(), size["files"].get<long long>());
    for (const Json& state : size["states"]) PrintState(state);
  }
}

}  // namespace weightbroker::bench
