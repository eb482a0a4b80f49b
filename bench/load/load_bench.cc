// How fast the loader makes a checkpoint resident, beside what the machine allows and beside other loaders of the same
// files, in the same run.
//
//   load_bench [--json] [--gib 2] [--folder F] [--cache cold|warm|both] [--rounds N] [--arms a,b] [--python P]
//   load_bench --gpu [--devices 0,1] [--tp 2] [--quantize fp8_block] --gib 30 --folder /dev/shm/F
//   load_bench --scaling
//
// First the ceilings: reading the files past the page cache and nothing else, or copying them from it; making a memfd
// of as many bytes, or copying as many from pinned memory to each GPU and to all at once. Each is measured in several
// ways, and the best is taken, by the slower of two samples. Then ceilings and arms take turns, each sample a fresh
// process, before which the files are evicted from the page cache or read into it, which mincore must confirm. Rivals
// are Python's, in rival.py; those that cannot be imported are listed with the reason.
//
// Two clocks: `load_seconds` from the process being ready (all imported, CUDA's context there) to all tensors there and
// the devices synchronized, memory allocation included; `exec_seconds` from exec to that.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "bench/bench_support.h"
#include "bench/load/model_folder.h"
#include "bench/load/report.h"
#include "bench/load/scaling.h"
#include "bench/load/size_bench.h"
#include "bench/load/task.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/device/gpu_inventory.h"
#include "common/process/spawn.h"

namespace weightbroker::bench {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

struct Flags {
  LoadSetup setup;
  std::string folder = WEIGHTBROKER_BENCH_DATA "/load";
  std::vector<double> gib = {2};
  std::string cache = "both";
  std::vector<std::string> devices;
  ModelRecipe recipe;
  bool gpu = false;
  bool scaling = false;
  bool keep = false;
  bool json = false;
  std::string task;  // in a fresh process that takes one sample
};

// Those that --devices names, by UUID or number, or all.
absl::StatusOr<std::vector<GpuInfo>> ChooseGpus(GpuInventory& inventory, const std::vector<std::string>& names) {
  ASSIGN_OR_RETURN(const std::vector<GpuInfo> all, inventory.List());
  if (all.empty()) return MakeError(Reason::kGpuUnavailable, "this machine has no GPU");
  if (names.empty()) return all;
  std::vector<GpuInfo> chosen;
  for (const std::string& name : names) {
    const auto found = std::find_if(all.begin(), all.end(), [&](const GpuInfo& gpu) {
      return gpu.uuid == name || absl::StrCat(gpu.ordinal) == name;
    });
    if (found == all.end()) return MakeError(Reason::kDeviceUnknown, absl::StrCat("there is no GPU ", name));
    chosen.push_back(*found);
  }
  return chosen;
}

absl::Status UseGpus(Flags* flags, OrderedJson* report) {
  ASSIGN_OR_RETURN(const std::unique_ptr<GpuInventory> inventory, OpenNvml());
  ASSIGN_OR_RETURN(const std::vector<GpuInfo> gpus, ChooseGpus(*inventory, flags->devices));
  for (const GpuInfo& gpu : gpus) {
    flags->setup.gpus.push_back(gpu.uuid);
    (*report)["gpus"].push_back({{"name", gpu.name}, {"uuid", gpu.uuid}});
  }
  (*report)["driver"] = inventory->driver_version();
  flags->setup.rivals.device = "cuda:0";
  // Rivals see the first GPU alone. This process itself never initializes CUDA.
  setenv("CUDA_VISIBLE_DEVICES", gpus.front().uuid.c_str(), 1);
  return absl::OkStatus();
}

absl::Status CheckFlags(const Flags& flags) {
  const auto devices = static_cast<int>(flags.setup.gpus.size());
  if (flags.gpu && flags.setup.tensor_parallel > devices) {
    return MakeError(Reason::kInvalidArgument,
                     absl::StrCat("--tp ", flags.setup.tensor_parallel, " needs as many GPUs; there are ", devices));
  }
  if (flags.recipe.tensors > 0 && (flags.setup.tensor_parallel > 1 || !flags.setup.quantization.empty())) {
    return MakeError(Reason::kInvalidArgument, "--tp and --quantize need a model's own tensors: leave out --tensors");
  }
  return absl::OkStatus();
}

std::vector<CacheState> StatesOf(const Flags& flags) {
  if (IsInMemory(flags.folder)) return {CacheState::kMemory};
  if (flags.cache == "cold") return {CacheState::kCold};
  if (flags.cache == "warm") return {CacheState::kWarm};
  return {CacheState::kCold, CacheState::kWarm};
}

absl::StatusOr<OrderedJson> MeasureSize(const Flags& flags, double gib) {
  ModelRecipe recipe = flags.recipe;
  recipe.bytes = static_cast<int64_t>(gib * kGiB);
  const std::string folder = absl::StrCat(flags.folder, "/", recipe.bytes, "-", recipe.tensors);
  std::cerr << "writing " << gib << " GiB to " << folder << "\n";
  ASSIGN_OR_RETURN(const ModelFolder model, WriteModelFolder(folder, recipe));
  OrderedJson report = {
      {"bytes", model.total_bytes}, {"tensors", model.tensor_count}, {"files", model.files.size()}, {"states", {}}};
  for (const CacheState state : StatesOf(flags)) {
    ASSIGN_OR_RETURN(OrderedJson measured, MeasureModel(flags.setup, model, state));
    report["states"].push_back(std::move(measured));
  }
  std::error_code ignored;
  if (!flags.keep) std::filesystem::remove_all(folder, ignored);
  return report;
}

absl::Status MeasureAll(Flags& flags, OrderedJson* report) {
  if (flags.scaling) {
    const auto bytes = static_cast<int64_t>(flags.gib.front() * kGiB);
    const ScalingRequest request{.folder = flags.folder, .bytes = bytes, .keep = flags.keep};
    ASSIGN_OR_RETURN((*report)["scaling"], MeasureScaling(flags.setup, request, StatesOf(flags).front()));
    return absl::OkStatus();
  }
  flags.setup.probed = ProbeRivals(flags.setup.rivals);
  (*report)["rivals"] = flags.setup.probed;
  for (const double gib : flags.gib) {
    ASSIGN_OR_RETURN(OrderedJson size, MeasureSize(flags, gib));
    (*report)["sizes"].push_back(std::move(size));
  }
  return absl::OkStatus();
}

absl::StatusOr<OrderedJson> Run(Flags flags) {
  if (flags.setup.loader.empty()) {
    ASSIGN_OR_RETURN(flags.setup.loader, PathBesideThisProgram("weightbroker-loader"));
  }
  std::error_code error;
  std::filesystem::create_directories(flags.folder, error);
  if (error) return SystemError(absl::StrCat("making the folder ", flags.folder), error.value());
  OrderedJson report = {{"benchmark", "load"},
                        {"rounds", flags.setup.rounds},
                        {"folder_in_memory", IsInMemory(flags.folder)},
                        {"machine", DescribeMachine()}};
  if (flags.gpu) RETURN_IF_ERROR(UseGpus(&flags, &report));
  RETURN_IF_ERROR(CheckFlags(flags));
  RETURN_IF_ERROR(MeasureAll(flags, &report));
  return report;
}

// A fresh process that takes one sample.
int TakeSample(const std::string& task) {
  const absl::StatusOr<OrderedJson> result = RunTask(task);
  if (!result.ok()) {
    std::cerr << result.status().message() << "\n";
    return 1;
  }
  std::cout << *result << std::endl;
  _exit(0);  // unmapping what was measured takes time
}

}  // namespace
}  // namespace weightbroker::bench

int main(int argc, char** argv) {
  weightbroker::bench::Flags flags;
  CLI::App app("Measures loading a checkpoint beside the machine's ceilings and other loaders.");
  app.add_option("--folder", flags.folder, "Where the models are to be written")->capture_default_str();
  app.add_option("--gib", flags.gib, "Sizes of the model")->delimiter(',')->capture_default_str();
  app.add_option("--tensors", flags.recipe.tensors, "So many tensors of equal length instead of a Llama's");
  app.add_option("--files", flags.recipe.files, "How many files they are in");
  app.add_option("--cache", flags.cache, "The page cache before a sample; tmpfs has no cold one")
      ->check(CLI::IsMember({"cold", "warm", "both"}))
      ->capture_default_str();
  app.add_option("--rounds", flags.setup.rounds, "How often each arm has its turn")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--arms", flags.setup.arms, "Only these arms; \"ours:reader_threads=8\" is ours with flags")
      ->delimiter(',');
  app.add_flag("--gpu", flags.gpu, "Load to GPUs instead of host memory");
  app.add_option("--devices", flags.devices, "UUIDs or numbers of the GPUs; all of them otherwise")->delimiter(',');
  app.add_option("--tp", flags.setup.tensor_parallel, "Also a load that is split over so many devices")
      ->check(CLI::PositiveNumber);
  app.add_option("--quantize", flags.setup.quantization, "Also a load that quantizes")
      ->check(CLI::IsMember({"fp8_block"}));
  app.add_flag("--scaling", flags.scaling, "Measure ours alone by threads, chunks and tensors");
  app.add_option("--loader", flags.setup.loader, "The loader; otherwise the one beside this program");
  app.add_option("--python", flags.setup.rivals.python, "A Python with torch, for the rivals")->capture_default_str();
  app.add_flag("--keep", flags.keep, "Leave the models there for the next run");
  app.add_flag("--json", flags.json, "Print JSON with every sample instead of a table");
  app.add_option("--task", flags.task, "Of the processes that it starts itself")->group("");
  CLI11_PARSE(app, argc, argv);
  if (!flags.task.empty()) return weightbroker::bench::TakeSample(flags.task);
  const bool json = flags.json;
  const auto report = weightbroker::bench::Run(std::move(flags));
  if (!report.ok()) {
    std::cerr << "load_bench: " << report.status().message() << "\n";
    return 1;
  }
  if (json) {
    std::cout << report->dump(2) << "\n";
  } else {
    weightbroker::bench::PrintReport(*report);
  }
  return 0;
}
