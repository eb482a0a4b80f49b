// How long the engines of a whole node wait for their weights when all ask at the same moment, one for each GPU: by the
// service, and through torch with one handle for each tensor.
//
//   gpu_ranks_bench [--gib 100] [--layout fused] [--rounds 3] [--samples 5] [--arms ours,torch] [--json]
//
// A model with the shapes of DeepSeek-V3, in block-wise FP8, of as many layers as come to `--gib` for each GPU, is
// loaded by one Register, tensor parallel over all GPUs. Its files have holes: they take some MiB of disk, each
// tensor's first page has bytes of its own, and the first engines verify every digest. Each sample has a fresh process
// for each rank, which waits with context and channel until all are there; the slowest counts, from its reading the
// word to go on until it has every pointer. The torch arm holds as many tensors of the same lengths on each GPU.

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
#include "absl/strings/str_join.h"
#include "bench/bench_process.h"
#include "bench/bench_support.h"
#include "bench/gpu/bench_service.h"
#include "bench/gpu/holder.h"
#include "bench/stamped_folder.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/device/gpu_inventory.h"
#include "common/synthetic/model.h"

namespace weightbroker::bench {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;
constexpr int64_t kHeadBytes = 4096;

struct Flags {
  std::string folder = WEIGHTBROKER_BENCH_DATA "/gpu_ranks";
  std::string bin_dir = WEIGHTBROKER_BIN_DIR;
  std::string python = "python3";
  std::string model = "deepseek";
  std::string layout = "fused";
  double gib = 100;  // for each GPU
  int rounds = 3;
  int samples = 5;
  std::vector<std::string> arms = {"ours", "torch"};
  bool json = false;
};

using Strings = std::vector<std::string>;

// Engines, one for each GPU, that go on at one moment. Each sees its own GPU alone.
class Crew {
 public:
  // `arguments` are those of each rank, with the program first.
  static absl::StatusOr<Crew> Start(const Strings& gpus, const std::vector<Strings>& arguments) {
    Crew crew;
    for (size_t rank = 0; rank < gpus.size(); ++rank) {
      Strings words = {"CUDA_VISIBLE_DEVICES=" + gpus[rank]};
      words.insert(words.end(), arguments[rank].begin(), arguments[rank].end());
      ASSIGN_OR_RETURN(crew.engines_.emplace_back(), Holder::Start("/usr/bin/env", words));
    }
    for (const auto& engine : crew.engines_) RETURN_IF_ERROR(engine->Expect("ready"));
    return crew;
  }

  absl::Status Send(const std::string& line) {
    for (const auto& engine : engines_) RETURN_IF_ERROR(engine->Send(line));
    return absl::OkStatus();
  }

  absl::Status SendTo(size_t rank, const std::string& line) { return engines_[rank]->Send(line); }

  absl::Status Expect(const std::string& line) {
    for (const auto& engine : engines_) RETURN_IF_ERROR(engine->Expect(line));
    return absl::OkStatus();
  }

  // What each prints, as JSON.
  absl::StatusOr<std::vector<nlohmann::json>> Read() {
    std::vector<nlohmann::json> answers;
    for (const auto& engine : engines_) {
      ASSIGN_OR_RETURN(const std::string line, engine->ReadLine());
      answers.push_back(nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false));
      if (!answers.back().is_object()) return MakeError(Reason::kProtocolError, "a sample is no JSON: " + line);
    }
    return answers;
  }

 private:
  std::vector<std::unique_ptr<Holder>> engines_;
};

class RanksBench {
 public:
  RanksBench(const Flags& flags, Strings gpus) : flags_(flags), gpus_(std::move(gpus)) {}

  absl::StatusOr<nlohmann::ordered_json> Run() {
    RETURN_IF_ERROR(WriteModel());
    for (int round = 0; round < flags_.rounds; ++round) {
      for (const std::string& arm : flags_.arms) {
        std::cerr << "round " << round << ", " << arm << "\n";
        RETURN_IF_ERROR(arm == "torch" ? TakeTorch() : TakeOurs());
      }
    }
    return Report();
  }

 private:
  absl::Status WriteModel() const {
    const auto bytes = static_cast<int64_t>(flags_.gib * kGiB) * static_cast<int64_t>(gpus_.size());
    ASSIGN_OR_RETURN(const CheckpointDraft draft,
                     DraftModel({.model = flags_.model, .published = true, .bytes = bytes, .fp8 = true}));
    const std::string stamp = nlohmann::json({{"model", flags_.model}, {"bytes", bytes}}).dump();
    return FillFolderOnce(flags_.folder, stamp, [&] {
      return WriteCheckpoint(draft, flags_.folder, {.sparse = true, .sparse_head_bytes = kHeadBytes});
    });
  }

  std::string SizesOf(size_t rank) const { return absl::StrCat(flags_.folder, ".sizes.", rank, ".json"); }
  std::string HandlesOf(size_t rank) const { return absl::StrCat(flags_.folder, ".handles.", rank); }

  absl::Status TakeOurs() {
    const SocketFolder sockets;
    BenchService service({.bin_dir = flags_.bin_dir, .folder = flags_.folder, .socket = sockets / "node.sock"});
    ASSIGN_OR_RETURN(const v1::WeightSet set, service.Start(Request()));
    loads_.push_back({{"load_seconds", set.load_seconds()}, {"read_bytes", set.read_bytes()}, {"shard_bytes", {}}});
    for (const v1::Shard& shard : set.shards()) loads_.back()["shard_bytes"].push_back(shard.size_bytes());
    // The first warms files, code and driver, and sees that the bytes are right.
    RETURN_IF_ERROR(OursAtOnce(service, /*first=*/true).status());
    for (int i = 0; i < flags_.samples; ++i) {
      ASSIGN_OR_RETURN(const auto answers, OursAtOnce(service, /*first=*/false));
      RETURN_IF_ERROR(Keep("ours", answers));
    }
    return absl::OkStatus();
  }

  v1::RegisterRequest Request() const {
    v1::RegisterRequest request;
    request.mutable_spec()->set_layout(flags_.layout);
    request.mutable_spec()->set_tensor_parallel_size(static_cast<int32_t>(gpus_.size()));
    for (const std::string& gpu : gpus_) request.add_devices(gpu);
    return request;
  }

  absl::StatusOr<std::vector<nlohmann::json>> OursAtOnce(const BenchService& service, bool first) const {
    std::vector<Strings> arguments;
    for (size_t rank = 0; rank < gpus_.size(); ++rank) {
      arguments.push_back({flags_.bin_dir + "/gpu_attach_sample", "--how", "attach", "--socket", service.socket(),
                           "--model", flags_.folder, "--layout", flags_.layout, "--tp", absl::StrCat(gpus_.size()),
                           "--rank", absl::StrCat(rank), "--image", WEIGHTBROKER_TOUCH_IMAGE, "--barrier",
                           "--started_at", Digits(NowSeconds())});
      if (first) arguments.back().insert(arguments.back().end(), {"--verify", "--sizes", SizesOf(rank)});
    }
    return AtOnce(arguments);
  }

  absl::StatusOr<std::vector<nlohmann::json>> AtOnce(const std::vector<Strings>& arguments) const {
    ASSIGN_OR_RETURN(Crew crew, Crew::Start(gpus_, arguments));
    RETURN_IF_ERROR(crew.Send("go"));
    return crew.Read();
  }

  // Of tensors of the lengths that ours had: that arm comes first.
  absl::Status TakeTorch() {
    std::vector<Strings> exports;
    std::vector<Strings> imports;
    for (size_t rank = 0; rank < gpus_.size(); ++rank) {
      const Strings script = {flags_.python, WEIGHTBROKER_TORCH_EXPORT};
      exports.push_back({script[0], script[1], "export", "--tensors_json", SizesOf(rank)});
      imports.push_back({script[0], script[1], "import", "--handles", HandlesOf(rank), "--image",
                         WEIGHTBROKER_TOUCH_IMAGE, "--barrier", "--started_at", Digits(NowSeconds())});
    }
    ASSIGN_OR_RETURN(Crew exporters, Crew::Start(gpus_, exports));
    for (int i = 0; i <= flags_.samples; ++i) {
      for (size_t rank = 0; rank < gpus_.size(); ++rank) RETURN_IF_ERROR(exporters.SendTo(rank, HandlesOf(rank)));
      RETURN_IF_ERROR(exporters.Expect("ok"));
      ASSIGN_OR_RETURN(const auto answers, AtOnce(imports));
      if (i > 0) RETURN_IF_ERROR(Keep("torch", answers));
    }
    return absl::OkStatus();
  }

  // Of each sample what the slowest rank took, and what each did.
  absl::Status Keep(const std::string& arm, const std::vector<nlohmann::json>& answers) {
    double slowest = 0;
    for (size_t rank = 0; rank < answers.size(); ++rank) {
      const nlohmann::json& times = answers[rank];
      const double seconds = times.at("pointers").get<double>() - times.at("connected").get<double>();
      slowest = std::max(slowest, seconds);
      series_[arm][absl::StrCat("rank_", rank)].push_back(seconds);
      if (times.contains("tensors")) tensors_[absl::StrCat("rank_", rank)] = times.at("tensors");
      const std::string checksum = times.at("checksum");
      const auto [known, is_new] = checksums_[arm].try_emplace(rank, checksum);
      if (!is_new && known->second != checksum) {
        return MakeError(Reason::kDigestMismatch, absl::StrCat(arm, ": rank ", rank, " read other bytes than before"));
      }
    }
    series_[arm]["slowest_rank"].push_back(slowest);
    return absl::OkStatus();
  }

  nlohmann::ordered_json Report() const {
    nlohmann::ordered_json report = {{"benchmark", "gpu_ranks"}, {"model", flags_.model},
                                     {"layout", flags_.layout},  {"ranks", gpus_.size()},
                                     {"gib_a_gpu", flags_.gib},  {"rounds", flags_.rounds},
                                     {"loads", loads_},          {"tensors_of_rank", tensors_}};
    for (const auto& [arm, steps] : series_) {
      for (const auto& [step, samples] : steps) report["attach_seconds"][arm][step] = ToJson(Summarize(samples));
    }
    return report;
  }

  const Flags& flags_;
  const Strings gpus_;
  nlohmann::ordered_json loads_ = nlohmann::ordered_json::array();
  nlohmann::ordered_json tensors_;
  std::map<std::string, std::map<std::string, std::vector<double>>> series_;
  std::map<std::string, std::map<size_t, std::string>> checksums_;
};

absl::StatusOr<nlohmann::ordered_json> Run(const Flags& flags) {
  ASSIGN_OR_RETURN(const std::unique_ptr<GpuInventory> inventory, OpenNvml());
  ASSIGN_OR_RETURN(const std::vector<GpuInfo> gpus, inventory->List());
  if (gpus.empty()) return MakeError(Reason::kGpuUnavailable, "this machine has no GPU");
  Strings uuids;
  for (const GpuInfo& gpu : gpus) uuids.push_back(gpu.uuid);
  ASSIGN_OR_RETURN(nlohmann::ordered_json report, RanksBench(flags, uuids).Run());
  report["gpu"] = gpus.front().name;
  report["driver"] = inventory->driver_version();
  report["machine"] = DescribeMachine();
  return report;
}

void Print(const nlohmann::ordered_json& report) {
  printf("%zu ranks of %.0f GiB, layout %s, milliseconds from a common start to every pointer\n",
         report["ranks"].get<size_t>(), report["gib_a_gpu"].get<double>(), report["layout"].get<std::string>().c_str());
  for (const auto& [arm, steps] : report["attach_seconds"].items()) {
    const auto& slowest = steps["slowest_rank"];
    printf("%-8s slowest rank: p50 %8.2f  least %8.2f  most %8.2f\n", arm.c_str(),
           slowest["median"].get<double>() * 1e3, slowest["least"].get<double>() * 1e3,
           slowest["greatest"].get<double>() * 1e3);
  }
}

}  // namespace
}  // namespace weightbroker::bench

int main(int argc, char** argv) {
  weightbroker::bench::Flags flags;
  CLI::App app("Measures engines on every GPU of a node that attach at one moment.");
  app.add_option("--folder", flags.folder, "Where the model is to be written")->capture_default_str();
  app.add_option("--bin_dir", flags.bin_dir, "Where weightbrokerd and the bench's programs are");
  app.add_option("--python", flags.python, "A Python with torch");
  app.add_option("--model", flags.model, "Whose shapes: a published model with FP8 weights")->capture_default_str();
  app.add_option("--layout", flags.layout)->check(CLI::IsMember({"hf", "fused"}))->capture_default_str();
  app.add_option("--gib", flags.gib, "For each GPU")->capture_default_str();
  app.add_option("--rounds", flags.rounds, "How often each arm has its turn")->capture_default_str();
  app.add_option("--samples", flags.samples, "Samples a turn")->capture_default_str();
  app.add_option("--arms", flags.arms, "Of ours, torch, in this order")->delimiter(',');
  app.add_flag("--json", flags.json, "Print JSON with every sample instead of a table");
  CLI11_PARSE(app, argc, argv);
  const auto report = weightbroker::bench::Run(flags);
  if (!report.ok()) {
    std::cerr << report.status().message() << "\n";
    return 1;
  }
  if (flags.json) {
    std::cout << report->dump(2) << "\n";
  } else {
    weightbroker::bench::Print(*report);
  }
  return 0;
}
