// How long it takes until a standby has taken over from the active engine of its group, seen by a process that is
// neither: from the kill (or the stop) of the active one to the standby's first read of weights as active. Beside it,
// in the same run, when the same process learns of the death by the closing of a socket of the dead one, which is what
// a gRPC stream ends with, and by its pidfd.
//
//   standby_bench [--samples 200] [--hang_samples 50] [--hold_gib 8] [--gib 2] [--timeout_ms 200] [--huge_pages]
//   [--gpu] [--json]
//
// The active engine holds memory of its own, all of it touched, which the kernel has to free before it closes sockets.
// Each engine that took over becomes the one that is ended next, and a fresh one stands by. With --gpu the weights are
// mapped from the first GPU (the files have holes: 100 GiB take some MiB).

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/bench_checkpoint.h"
#include "bench/bench_process.h"
#include "bench/bench_support.h"
#include "bench/standby/member.h"
#include "bench/standby/observer.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker::bench {
namespace {

constexpr double kGiB = static_cast<double>(int64_t{1} << 30);

struct Flags {
  std::string folder = WEIGHTBROKER_BENCH_DATA "/standby";
  std::string bin_dir = WEIGHTBROKER_BIN_DIR;
  double gib = 2;
  double hold_gib = 8;
  int64_t tensors = 600;
  int64_t files = 2;
  int samples = 200;
  int hang_samples = 50;
  int timeout_ms = 200;
  double limit_seconds = 24 * 3600;
  bool gpu = false;
  bool huge_pages = false;
  bool json = false;
  // Of a member.
  bool member = false;
  MemberFlags member_flags;
};

class Bench {
 public:
  explicit Bench(const Flags& flags)
      : flags_(flags),
        member_{.socket = folder_ / "s",
                .model = flags.folder,
                .group = "bench",
                .hold_bytes = static_cast<int64_t>(flags.hold_gib * kGiB),
                .timeout_ms = flags.timeout_ms,
                .huge_pages = flags.huge_pages,
                .gpu = flags.gpu} {}

  absl::StatusOr<nlohmann::ordered_json> Run() {
    RETURN_IF_ERROR(WriteBenchCheckpoint(flags_.folder, {.total_bytes = static_cast<int64_t>(flags_.gib * kGiB),
                                                         .tensor_count = flags_.tensors,
                                                         .shard_count = flags_.files,
                                                         .has_holes = true}));
    ASSIGN_OR_RETURN(const ChildProcess service,
                     Spawn({.path = flags_.bin_dir + "/weightbrokerd",
                            .arguments = {"--socket", member_.socket, "--model_roots", "bench=" + flags_.folder,
                                          "--metrics_address", "127.0.0.1:0", "--log_level", "warning"}}));
    ASSIGN_OR_RETURN(WatchedMember active, WatchedMember::Start(member_));
    RETURN_IF_ERROR(active.WaitFor(MemberReport::Step::kJoined).status());
    RETURN_IF_ERROR(active.WaitFor(MemberReport::Step::kActive).status());
    const double until = NowSeconds() + flags_.limit_seconds;
    for (int i = 0; i < Count() && NowSeconds() < until; ++i) RETURN_IF_ERROR(TakeOne(i, &active));
    return Report();
  }

 private:
  int Count() const { return flags_.samples + flags_.hang_samples; }

  // Spread evenly over the others.
  bool IsHang(int number) const {
    const int64_t hangs = flags_.hang_samples;
    return (number + 1) * hangs / Count() != number * hangs / Count();
  }

  absl::Status TakeOne(int number, WatchedMember* active) {
    ASSIGN_OR_RETURN(WatchedMember standby, WatchedMember::Start(member_));
    RETURN_IF_ERROR(standby.WaitFor(MemberReport::Step::kJoined).status());
    RETURN_IF_ERROR(active->WaitFor(MemberReport::Step::kHolds).status());
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // whatever the two have begun is over
    const bool dies = !IsHang(number);
    ASSIGN_OR_RETURN(const Sample sample, dies ? TimeDeath(*active, standby) : TimeHang(*active, standby));
    for (const auto& [name, seconds] : sample) series_[dies ? "died" : "hung"][name].push_back(seconds);
    if (dies) {
      series_["ratio"]["socket_close"].push_back(sample.at("socket_close") / sample.at("takeover"));
      series_["ratio"]["pidfd"].push_back(sample.at("pidfd") / sample.at("takeover"));
    }
    std::cerr << (dies ? "died " : "hung ") << number << ": " << sample.at("takeover") * 1e3 << " ms\n";
    *active = std::move(standby);
    return absl::OkStatus();
  }

  nlohmann::ordered_json Report() const {
    nlohmann::ordered_json report = {{"benchmark", "standby"},
                                     {"weights", flags_.gpu ? "GPU" : "HOST_MEMFD"},
                                     {"weight_bytes", static_cast<int64_t>(flags_.gib * kGiB)},
                                     {"tensors", flags_.tensors},
                                     {"active_holds_bytes", member_.hold_bytes},
                                     {"in_huge_pages", flags_.huge_pages},
                                     {"heartbeat_timeout_seconds", flags_.timeout_ms / 1e3},
                                     {"machine", DescribeMachine()}};
    for (const auto& [arm, names] : series_) {
      for (const auto& [name, samples] : names) {
        report[arm == "ratio" ? "ratio_to_takeover" : "seconds_" + arm][name] = ToJson(Summarize(samples));
      }
    }
    return report;
  }

  const Flags& flags_;
  const SocketFolder folder_;
  const MemberFlags member_;
  std::map<std::string, std::map<std::string, std::vector<double>>> series_;
};

void PrintTable(const nlohmann::ordered_json& report) {
  printf("%-14s %-22s %6s %10s %10s %10s %10s\n", "active", "what", "n", "p50 ms", "p90 ms", "p99 ms", "most ms");
  for (const char* arm : {"died", "hung"}) {
    if (!report.contains(absl::StrCat("seconds_", arm))) continue;
    for (const auto& [name, summary] : report[absl::StrCat("seconds_", arm)].items()) {
      printf("%-14s %-22s %6zu %10.3f %10.3f %10.3f %10.3f\n", arm, name.c_str(), summary["samples"].size(),
             summary["median"].get<double>() * 1e3, summary["p90"].get<double>() * 1e3,
             summary["p99"].get<double>() * 1e3, summary["greatest"].get<double>() * 1e3);
    }
  }
  if (!report.contains("ratio_to_takeover")) return;
  for (const auto& [name, summary] : report["ratio_to_takeover"].items()) {
    printf("%s after %.1f times the takeover (median of the ratios)\n", name.c_str(), summary["median"].get<double>());
  }
}

int Finish(const absl::StatusOr<nlohmann::ordered_json>& report, bool json) {
  if (!report.ok()) {
    std::cerr << report.status().message() << "\n";
    return 1;
  }
  if (json) {
    std::cout << report->dump(2) << "\n";
  } else {
    PrintTable(*report);
  }
  return 0;
}

}  // namespace
}  // namespace weightbroker::bench

int main(int argc, char** argv) {
  weightbroker::bench::Flags flags;
  CLI::App app("Measures how soon a standby engine has taken over from one that dies or hangs.");
  app.add_option("--folder", flags.folder, "Where the model is, or is to be written");
  app.add_option("--bin_dir", flags.bin_dir, "Where weightbrokerd is");
  app.add_option("--gib", flags.gib, "Of weights");
  app.add_option("--hold_gib", flags.hold_gib, "Of memory of its own that the active engine has touched");
  app.add_option("--tensors", flags.tensors, "How many");
  app.add_option("--files", flags.files, "How many files they are in");
  app.add_option("--samples", flags.samples, "Of an active engine that is killed");
  app.add_option("--hang_samples", flags.hang_samples, "Of one that is stopped");
  app.add_option("--timeout_ms", flags.timeout_ms, "The group's heartbeat time-out");
  app.add_option("--limit_seconds", flags.limit_seconds, "Take no more samples after so long");
  app.add_flag("--huge_pages", flags.huge_pages,
               "Hold that memory in huge pages, which are sooner there and sooner freed");
  app.add_flag("--gpu", flags.gpu, "Map the weights from the first GPU instead of from host memory");
  app.add_flag("--json", flags.json, "Print JSON with every sample instead of a table");
  app.add_flag("--member", flags.member, "Be an engine that is watched")->group("");
  app.add_option("--socket", flags.member_flags.socket, "Of the service, for a member")->group("");
  app.add_option("--group", flags.member_flags.group, "For a member")->group("");
  app.add_option("--hold_bytes", flags.member_flags.hold_bytes, "For a member")->group("");
  CLI11_PARSE(app, argc, argv);
  if (!flags.member) {
    return weightbroker::bench::Finish(weightbroker::bench::Bench(flags).Run(), flags.json);
  }
  flags.member_flags.model = flags.folder;
  flags.member_flags.timeout_ms = flags.timeout_ms;
  flags.member_flags.huge_pages = flags.huge_pages;
  flags.member_flags.gpu = flags.gpu;
  std::cerr << weightbroker::bench::RunMember(flags.member_flags).message() << "\n";
  return 1;
}
