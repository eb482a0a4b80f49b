#include "bench/load/scaling.h"

#include <filesystem>
#include <iostream>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/bench_support.h"
#include "bench/load/loader_arm.h"
#include "common/base/status_macros.h"

namespace weightbroker::bench {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr int kThreads[] = {1, 2, 4, 8, 16};
constexpr int kReads[] = {1, 2, 4, 8, 16};
constexpr int64_t kChunkMiB[] = {1, 2, 4, 8, 16, 32};
constexpr int64_t kFiles = 8;  // the same for every row
constexpr int64_t kTensors[] = {10, 100, 1'000, 20'000, 100'000};

// One setting of what a table is about.
struct Row {
  int64_t value = 0;
  LoaderTask task;
  std::vector<std::string> files;  // the model's
  int64_t bytes = 0;
  std::vector<OrderedJson> samples = {};
};

class ScalingBench {
 public:
  ScalingBench(const LoadSetup& setup, const ScalingRequest& request, CacheState state)
      : setup_(setup), request_(request), state_(state) {}

  absl::StatusOr<OrderedJson> Run() {
    OrderedJson report = {{"page_cache", NameOf(state_)}, {"bytes", request_.bytes}};
    ASSIGN_OR_RETURN(const Row plain, RowOf(0));
    ASSIGN_OR_RETURN(report["reader_threads"], Measure("reader threads", ThreadRows(plain)));
    ASSIGN_OR_RETURN(report["reads_per_thread"], Measure("reads a thread", ReadsRows(plain)));
    ASSIGN_OR_RETURN(report["chunk_bytes"], Measure("chunk bytes", ChunkRows(plain)));
    Forget(0);
    for (const int64_t tensors : kTensors) {
      ASSIGN_OR_RETURN(const Row row, RowOf(tensors));
      ASSIGN_OR_RETURN(const OrderedJson measured, Measure("tensors", {row}));
      report["tensors"].update(measured);
      Forget(tensors);
    }
    return report;
  }

 private:
  std::string FolderOf(int64_t tensors) const { return absl::StrCat(request_.folder, "/tensors-", tensors); }

  void Forget(int64_t tensors) const {
    std::error_code ignored;
    if (!request_.keep) std::filesystem::remove_all(FolderOf(tensors), ignored);
  }

  // Of a model of so many tensors, or a Llama's if 0.
  absl::StatusOr<Row> RowOf(int64_t tensors) const {
    ASSIGN_OR_RETURN(
        const ModelFolder model,
        WriteModelFolder(FolderOf(tensors), {.bytes = request_.bytes, .tensors = tensors, .files = kFiles}));
    Row row{.value = tensors, .task = {}, .files = model.files, .bytes = model.total_bytes};
    row.task.loader = setup_.loader;
    ASSIGN_OR_RETURN(row.task.identity, ReadCheckpointIdentity(RealFileSystem(), model.path));
    if (!setup_.gpus.empty()) row.task.devices = {setup_.gpus.front()};
    return row;
  }

  static std::vector<Row> ThreadRows(const Row& plain) {
    std::vector<Row> rows;
    for (const int threads : kThreads) {
      rows.push_back(plain);
      rows.back().value = threads;
      rows.back().task.reader_threads = threads;
    }
    return rows;
  }

  static std::vector<Row> ReadsRows(const Row& plain) {
    std::vector<Row> rows;
    for (const int reads : kReads) {
      rows.push_back(plain);
      rows.back().value = reads;
      rows.back().task.reads_per_thread = reads;
    }
    return rows;
  }

  static std::vector<Row> ChunkRows(const Row& plain) {
    std::vector<Row> rows;
    for (const int64_t mib : kChunkMiB) {
      rows.push_back(plain);
      rows.back().value = mib << 20;
      rows.back().task.chunk_bytes = mib << 20;
    }
    return rows;
  }

  absl::StatusOr<OrderedJson> Measure(const char* what, std::vector<Row> rows) const {
    for (int round = 0; round <= setup_.rounds; ++round) {  // the first warms
      for (Row& row : rows) {
        std::cerr << what << " " << row.value << ", round " << round << "\n";
        RETURN_IF_ERROR(PreparePageCache(state_, row.files));
        ASSIGN_OR_RETURN(const Sample sample, RunLoader(row.task, /*verify=*/false));
        if (round > 0) row.samples.push_back(sample.figures);
      }
    }
    OrderedJson report;
    for (const Row& row : rows) report[absl::StrCat(row.value)] = Describe(row);
    return report;
  }

  static OrderedJson Describe(const Row& row) {
    std::vector<double> rates;
    std::vector<double> cpu;
    std::vector<double> planned;
    for (const OrderedJson& sample : row.samples) {
      rates.push_back(static_cast<double>(row.bytes) / sample.at("load_seconds").get<double>());
      cpu.push_back(sample.at("cpu_seconds").get<double>());
      planned.push_back(sample.at("planned_seconds").get<double>());
    }
    return {{"bytes", row.bytes},
            {"bytes_per_second", ToJson(Summarize(rates))},
            {"cpu_seconds", Summarize(cpu).median},
            {"planned_seconds", Summarize(planned).median},
            {"samples", row.samples}};
  }

  const LoadSetup& setup_;
  const ScalingRequest& request_;
  const CacheState state_;
};

}  // namespace

absl::StatusOr<OrderedJson> MeasureScaling(const LoadSetup& setup, const ScalingRequest& request, CacheState state) {
  return ScalingBench(setup, request, state).Run();
}

}  // namespace weightbroker::bench
