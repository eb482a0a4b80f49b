// How fast the GPU quantizes to FP8, against what a copy moves in the same run: an element of BF16 is 3 bytes, 2 read
// and 1 written.
//
//   fp8_bench [--json]
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "bench/bench_support.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/device/cuda_context.h"
#include "common/device/gpu_inventory.h"
#include "common/device/gpu_quantizer.h"

namespace weightbroker::bench {
namespace {

constexpr int64_t kColumns = 7168;
constexpr int64_t kRows = 131'072;  // 1.75 GiB of BF16: nothing of it stays in a cache
constexpr int kLaunches = 20;
constexpr int kRounds = 7;

using Samples = std::map<std::string, std::vector<double>>;  // of what -> bytes a second

class Bench {
 public:
  explicit Bench(CudaContext context) : context_(std::move(context)), cuda_(context_.driver()) {}

  absl::StatusOr<Samples> Run() {
    const CudaScope current(context_);
    RETURN_IF_ERROR(current.status());
    RETURN_IF_ERROR(Prepare());
    ASSIGN_OR_RETURN(const GpuQuantizer quantizer, GpuQuantizer::Create(context_));
    Samples result;
    const auto quantize = [&](Fp8Source source, int64_t element_bytes, int64_t rows) {
      return quantizer.Launch(source,
                              {.from = source_,
                               .from_row_bytes = kColumns * element_bytes,
                               .to = codes_,
                               .to_row_elements = kColumns,
                               .scales = scales_,
                               .scale_row_elements = kColumns / 128,
                               .rows = rows,
                               .columns = kColumns,
                               .not_finite = not_finite_,
                               .not_finite_base = 0},
                              nullptr);
    };
    const int64_t elements = kRows * kColumns;
    for (int round = 0; round < kRounds; ++round) {  // one after the other, so that both meet the same machine
      RETURN_IF_ERROR(Measure(
          "copy", 2 * 2 * elements / 2, [&] { return Copy(elements); }, result));
      RETURN_IF_ERROR(Measure(
          "bf16", 3 * elements, [&] { return quantize(Fp8Source::kBf16, 2, kRows); }, result));
      RETURN_IF_ERROR(Measure(
          "f16", 3 * elements, [&] { return quantize(Fp8Source::kF16, 2, kRows); }, result));
      RETURN_IF_ERROR(Measure(
          "f32", 5 * elements / 2, [&] { return quantize(Fp8Source::kF32, 4, kRows / 2); }, result));
    }
    return result;
  }

 private:
  absl::Status Check(CudaResult result, const char* call) const {
    return result == kCudaSuccess ? absl::OkStatus() : CudaError(cuda_, result, call, "measuring");
  }

  absl::Status Prepare() {
    const auto size = static_cast<size_t>(kRows * kColumns * 2);
    RETURN_IF_ERROR(Check(cuda_.MemAlloc(size, &source_), "cuMemAlloc"));
    RETURN_IF_ERROR(Check(cuda_.MemAlloc(size, &codes_), "cuMemAlloc"));
    RETURN_IF_ERROR(Check(cuda_.MemAlloc(static_cast<size_t>(kRows * kColumns / 4096), &scales_), "cuMemAlloc"));
    RETURN_IF_ERROR(Check(cuda_.MemAlloc(sizeof(uint64_t), &not_finite_), "cuMemAlloc"));
    // Ordinary numbers of each type: 0x3C3C3C3C.
    RETURN_IF_ERROR(Check(cuda_.MemsetD8Async(source_, 0x3C, size, nullptr), "cuMemsetD8Async"));
    RETURN_IF_ERROR(Check(cuda_.MemsetD8Async(not_finite_, 0xFF, sizeof(uint64_t), nullptr), "cuMemsetD8Async"));
    std::ifstream file(WEIGHTBROKER_COPY_IMAGE, std::ios::binary);
    std::ostringstream image;
    image << file.rdbuf();
    CudaModule module = nullptr;
    RETURN_IF_ERROR(Check(cuda_.ModuleLoadData(image.str().data(), &module), "cuModuleLoadData"));
    return Check(cuda_.ModuleGetFunction(module, "copy_vectors", &copy_), "cuModuleGetFunction");
  }

  // Half of the source to where the codes go: as many bytes read as written.
  absl::Status Copy(int64_t bytes) {
    CudaDevicePtr from = source_;
    CudaDevicePtr to = codes_;
    auto count = static_cast<uint64_t>(bytes / 16);
    void* parameters[] = {&from, &to, &count};
    return Check(cuda_.LaunchKernel(copy_, {.grid_blocks = 132 * 16, .block_threads = 512}, nullptr, parameters),
                 "cuLaunchKernel");
  }

  absl::Status Measure(const std::string& name, int64_t bytes, const std::function<absl::Status()>& launch,
                       Samples& result) {
    RETURN_IF_ERROR(launch());  // warm
    RETURN_IF_ERROR(Check(cuda_.StreamSynchronize(nullptr), "cuStreamSynchronize"));
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kLaunches; ++i) RETURN_IF_ERROR(launch());
    RETURN_IF_ERROR(Check(cuda_.StreamSynchronize(nullptr), "cuStreamSynchronize"));
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    result[name].push_back(static_cast<double>(bytes) * kLaunches / seconds.count());
    return absl::OkStatus();
  }

  const CudaContext context_;
  CudaDriver& cuda_;
  // Freed with the process.
  CudaDevicePtr source_ = 0;
  CudaDevicePtr codes_ = 0;
  CudaDevicePtr scales_ = 0;
  CudaDevicePtr not_finite_ = 0;
  CudaFunction copy_ = nullptr;
};

absl::StatusOr<nlohmann::ordered_json> RunOnFirstGpu() {
  ASSIGN_OR_RETURN(const std::unique_ptr<GpuInventory> inventory, OpenNvml());
  ASSIGN_OR_RETURN(CudaDriver* const cuda, LoadCudaDriver());
  ASSIGN_OR_RETURN(const std::string uuid, UuidOfCudaDevice(*cuda, 0));
  ASSIGN_OR_RETURN(const std::vector<GpuInfo> gpus, inventory->List());
  ASSIGN_OR_RETURN(CudaContext context, CudaContext::Retain(*cuda, 0));
  ASSIGN_OR_RETURN(const auto samples, Bench(std::move(context)).Run());
  nlohmann::ordered_json report = {
      {"benchmark", "gpu_fp8"}, {"driver", inventory->driver_version()}, {"rows", kRows},
      {"columns", kColumns},    {"launches_a_sample", kLaunches},        {"machine", DescribeMachine()}};
  for (const GpuInfo& gpu : gpus) {
    if (gpu.uuid == uuid) report["gpu"] = gpu.name;
  }
  for (const auto& [name, speeds] : samples) report["bytes_per_second"][name] = ToJson(Summarize(speeds));
  const auto median = [&](const std::string& name) { return report["bytes_per_second"][name]["median"].get<double>(); };
  for (const auto& [name, speeds] : samples) report["share_of_the_copy"][name] = median(name) / median("copy");
  return report;
}

int Run(bool json) {
  const auto result = RunOnFirstGpu();
  if (!result.ok()) {
    std::fprintf(stderr, "fp8_bench: %s\n", std::string(result.status().message()).c_str());
    return 1;
  }
  if (json) {
    std::printf("%s\n", result->dump(2).c_str());
    return 0;
  }
  for (const auto& [name, share] : (*result)["share_of_the_copy"].items()) {
    std::printf("%-5s %8.0f GB/s  %5.1f %% of the copy\n", name.c_str(),
                (*result)["bytes_per_second"][name]["median"].get<double>() / 1e9, 100 * share.get<double>());
  }
  return 0;
}

}  // namespace
}  // namespace weightbroker::bench

int main(int argc, char** argv) {
  CLI::App app{"Measures quantizing to FP8 on the first GPU."};
  bool json = false;
  app.add_flag("--json", json, "Print JSON with every sample");
  CLI11_PARSE(app, argc, argv);
  return weightbroker::bench::Run(json);
}
