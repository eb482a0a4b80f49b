// How long a fresh engine process waits for its weights in GPU memory: by the two kinds of handles of the service, and
// by one handle for each tensor, in plain C++ and through torch.
//
//   gpu_attach_bench [--gib 1,24,120] [--tensors 6000] [--files 161] [--rounds N] [--samples N] [--arms a,b] [--json]
//
// Every sample is a process of its own that gives the time of each of its steps, from being asked for to one read of
// every 2 MiB page, and a checksum of what it read: all arms must give the same one. Where the GPU has room for the
// weights of all arms at once, arms take turns sample by sample; where it has not, each in its turn makes its weights,
// gives `--samples` samples, and lets them go, `--rounds` times.
// The files have holes, so that 120 GiB of weights take some MiB of disk; each tensor's first page has bytes of its
// own.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/bench_checkpoint.h"
#include "bench/bench_support.h"
#include "bench/gpu/arms.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/device/gpu_inventory.h"

namespace weightbroker::bench {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

struct Flags {
  GpuBenchSetup setup;
  std::vector<double> gib = {1, 24, 120};
  int64_t tensors = 6000;
  int64_t files = 161;
  int rounds = 3;
  int samples = 5;
  std::vector<std::string> arms = {"vmm", "vmm_torch", "ipc", "tensors", "torch"};
  bool json = false;
};

using Series = std::map<std::string, std::map<std::string, std::vector<double>>>;  // arm -> step -> seconds

// Between these steps lies what an engine waits for; each is said beside the seconds since the process was asked for.
struct Interval {
  const char* name;
  const char* from;
  const char* to;
};
constexpr Interval kIntervals[] = {
    {"attach_to_pointers", "connected", "pointers"},  // channel and context are there
    {"attach_to_tensors", "connected", "bound"},      // and every torch::Tensor
    {"connect_and_attach", "kernel_loaded", "pointers"},
    {"first_touch", "bound", "touched"},
};

// All sizes are of one GPU; one size at a time.
class SizeBench {
 public:
  SizeBench(const Flags& flags, const BenchCheckpoint& checkpoint, int64_t free_bytes)
      : flags_(flags), checkpoint_(checkpoint), free_bytes_(free_bytes) {}

  absl::StatusOr<nlohmann::ordered_json> Run() {
    GpuBenchSetup setup = flags_.setup;
    setup.folder = absl::StrCat(flags_.setup.folder, "/", checkpoint_.total_bytes, "-", checkpoint_.tensor_count);
    setup.checkpoint = checkpoint_;
    RETURN_IF_ERROR(WriteBenchCheckpoint(setup.folder, checkpoint_));
    const bool together = FitTogether();
    RETURN_IF_ERROR(together ? TakeTurnsBySample(setup) : TakeTurnsByArm(setup));
    return Report(together);
  }

 private:
  bool FitTogether() const {
    const auto arms = static_cast<int64_t>(flags_.arms.size());
    constexpr int64_t kSlackBytes = 2 * kGiB;  // contexts, and what an allocation for each tensor wastes
    return arms * (checkpoint_.total_bytes + kSlackBytes) < free_bytes_;
  }

  absl::Status TakeTurnsBySample(const GpuBenchSetup& setup) {
    std::vector<std::unique_ptr<Arm>> arms;
    for (const std::string& name : flags_.arms) {
      ASSIGN_OR_RETURN(std::unique_ptr<Arm> arm, MakeArm(name, setup));
      arms.push_back(std::move(arm));
    }
    for (const auto& arm : arms) RETURN_IF_ERROR(arm->Sample().status());  // warms files, code and driver
    for (int i = 0; i < flags_.rounds * flags_.samples; ++i) {
      for (size_t a = 0; a < arms.size(); ++a) RETURN_IF_ERROR(TakeOne(flags_.arms[a], *arms[a]));
    }
    return absl::OkStatus();
  }

  absl::Status TakeTurnsByArm(const GpuBenchSetup& setup) {
    for (int round = 0; round < flags_.rounds; ++round) {
      for (const std::string& name : flags_.arms) {
        std::cerr << "round " << round << ", " << name << "\n";
        ASSIGN_OR_RETURN(const std::unique_ptr<Arm> arm, MakeArm(name, setup));
        RETURN_IF_ERROR(arm->Sample().status());
        for (int i = 0; i < flags_.samples; ++i) RETURN_IF_ERROR(TakeOne(name, *arm));
      }
    }
    return absl::OkStatus();
  }

  absl::Status TakeOne(const std::string& name, Arm& arm) {
    ASSIGN_OR_RETURN(const nlohmann::json times, arm.Sample());
    const std::string checksum = times.at("checksum");
    if (checksum_.empty()) checksum_ = checksum;
    if (checksum != checksum_) {
      return MakeError(Reason::kDigestMismatch,
                       absl::StrCat(name, " read other bytes than the arms before it: ", checksum, " and ", checksum_));
    }
    for (const auto& [step, value] : times.items()) {
      if (value.is_number()) series_[name]["since_exec." + step].push_back(value.get<double>());
    }
    for (const Interval& interval : kIntervals) {
      const double seconds = times.at(interval.to).get<double>() - times.at(interval.from).get<double>();
      series_[name][interval.name].push_back(seconds);
    }
    if (times.contains("attach_parts")) {
      for (const auto& [part, value] : times.at("attach_parts").items()) {
        series_[name]["attach." + part].push_back(value.get<double>());
      }
    }
    return absl::OkStatus();
  }

  nlohmann::ordered_json Report(bool together) const {
    nlohmann::ordered_json report = {{"bytes", checkpoint_.total_bytes},
                                     {"tensors", checkpoint_.tensor_count},
                                     {"files", checkpoint_.shard_count},
                                     {"turns", together ? "by sample" : "by arm"},
                                     {"checksum", checksum_}};
    for (const auto& [arm, steps] : series_) {
      for (const auto& [step, samples] : steps) report["seconds"][arm][step] = ToJson(Summarize(samples));
    }
    return report;
  }

  const Flags& flags_;
  const BenchCheckpoint checkpoint_;
  const int64_t free_bytes_;
  Series series_;
  std::string checksum_;
};

void PrintTable(const nlohmann::ordered_json& size) {
  printf("\n%.1f GiB, %lld tensors, %lld files, turns %s\n", size["bytes"].get<double>() / kGiB,
         size["tensors"].get<long long>(), size["files"].get<long long>(), size["turns"].get<std::string>().c_str());
  printf("%-10s %-28s %10s %10s %10s\n", "arm", "step", "p50 ms", "p90 ms", "least ms");
  for (const auto& [arm, steps] : size["seconds"].items()) {
    for (const auto& [step, summary] : steps.items()) {
      printf("%-10s %-28s %10.3f %10.3f %10.3f\n", arm.c_str(), step.c_str(), summary["median"].get<double>() * 1e3,
             summary["p90"].get<double>() * 1e3, summary["least"].get<double>() * 1e3);
    }
  }
}

absl::StatusOr<nlohmann::ordered_json> Run(Flags flags) {
  ASSIGN_OR_RETURN(const std::unique_ptr<GpuInventory> inventory, OpenNvml());
  ASSIGN_OR_RETURN(const std::vector<GpuInfo> gpus, inventory->List());
  if (gpus.empty()) return MakeError(Reason::kGpuUnavailable, "this machine has no GPU");
  const GpuInfo& gpu = gpus.front();
  flags.setup.gpu_uuid = gpu.uuid;
  // For the samples and exporters: each sees this GPU alone, as its first. This process itself never initializes CUDA.
  setenv("CUDA_VISIBLE_DEVICES", gpu.uuid.c_str(), 1);
  nlohmann::ordered_json report = {{"benchmark", "gpu_attach"},
                                   {"gpu", gpu.name},
                                   {"driver", inventory->driver_version()},
                                   {"rounds", flags.rounds},
                                   {"samples_a_round", flags.samples},
                                   {"machine", DescribeMachine()}};
  for (const double gib : flags.gib) {
    const BenchCheckpoint checkpoint{.total_bytes = static_cast<int64_t>(gib * kGiB),
                                     .tensor_count = flags.tensors,
                                     .shard_count = std::min(flags.files, flags.tensors),
                                     .has_holes = true};
    ASSIGN_OR_RETURN(const GpuMemory memory, inventory->Memory(gpu.uuid));
    std::cerr << gib << " GiB; " << memory.free_bytes / kGiB << " GiB of the GPU are free\n";
    ASSIGN_OR_RETURN(nlohmann::ordered_json size, SizeBench(flags, checkpoint, memory.free_bytes).Run());
    if (!flags.json) PrintTable(size);
    report["sizes"].push_back(std::move(size));
  }
  return report;
}

}  // namespace
}  // namespace weightbroker::bench

int main(int argc, char** argv) {
  weightbroker::bench::Flags flags;
  CLI::App app("Measures attaching to weights in GPU memory beside one handle for each tensor.");
  app.add_option("--folder", flags.setup.folder, "Where the models are, or are to be written")->capture_default_str();
  app.add_option("--bin_dir", flags.setup.bin_dir, "Where weightbrokerd and the bench's programs are");
  app.add_option("--python", flags.setup.python, "A Python with torch, for the arm through torch");
  app.add_option("--gib", flags.gib, "Sizes of the model")->delimiter(',');
  app.add_option("--tensors", flags.tensors, "How many");
  app.add_option("--files", flags.files, "How many files they are in");
  app.add_option("--rounds", flags.rounds, "How often each arm has its turn");
  app.add_option("--samples", flags.samples, "Samples a turn");
  app.add_option("--arms", flags.arms, "Of vmm, vmm_torch, ipc, tensors, torch")->delimiter(',');
  app.add_flag("--json", flags.json, "Print JSON with every sample instead of a table");
  CLI11_PARSE(app, argc, argv);
  const auto report = weightbroker::bench::Run(flags);
  if (!report.ok()) {
    std::cerr << report.status().message() << "\n";
    return 1;
  }
  if (flags.json) std::cout << report->dump(2) << "\n";
  return 0;
}
