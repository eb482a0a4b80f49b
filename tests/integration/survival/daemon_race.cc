// Many engines start at once where no service is, each ready to start one: exactly one does, and all attach to it.
//
//   weightbroker-daemon-race --engines 16 --rounds 20 --seed 1
//
// Exits 0 if that is so in every round.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/program.h"
#include "tests/integration/survival/started_service.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker::testing {
namespace {

struct Flags {
  int engines = 16;
  int rounds = 20;
  uint32_t seed = 1;
  int max_pause_ms = 20;  // between two engines' starts
};

int CountLines(const std::string& text, const std::string& word) {
  int count = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++count;
  return count;
}

class Race {
 public:
  explicit Race(Flags flags) : flags_(flags), random_(flags.seed) {}

  int Run() {
    for (int round = 0; round < flags_.rounds; ++round) RunRound();
    std::sort(attach_ms_.begin(), attach_ms_.end());
    printf(
        "%d rounds, %d engines, seed %u: attached in p50 %.0f ms, max %.0f ms, start of the service included; "
        "complaints: %d\n",
        flags_.rounds, flags_.engines, flags_.seed, attach_ms_.empty() ? 0 : attach_ms_[attach_ms_.size() / 2],
        attach_ms_.empty() ? 0 : attach_ms_.back(), complaints_);
    return complaints_ == 0 ? 0 : 1;
  }

 private:
  void Complain(const std::string& what) {
    ++complaints_;
    printf("WRONG: %s\n", what.c_str());
  }

  void RunRound() {
    const TemporaryFolder folder;
    std::filesystem::create_directories(folder / "models/m");
    CheckpointBuilder().Tensor("w", "BF16", {64, 64}).Write(folder / "models/m");
    StartedService service(folder / "s.sock");
    std::vector<std::string> flags = service.EngineFlags("models:m", "models=" + (folder / "models"));
    flags.insert(flags.end(), {"--deadline_seconds", "60"});

    std::vector<std::unique_ptr<Program>> engines;
    for (int i = 0; i < flags_.engines; ++i) {
      engines.push_back(std::make_unique<Program>("engine", flags));
      std::this_thread::sleep_for(
          std::chrono::microseconds(random_() % (1 + static_cast<uint32_t>(flags_.max_pause_ms) * 1000)));
    }
    std::set<std::string> fingerprints;
    for (const auto& engine : engines) CheckEngine(*engine, &fingerprints);
    if (fingerprints.size() > 1) Complain("the engines have different weights");
    if (service.CountKeepers() != 1) Complain(std::to_string(service.CountKeepers()) + " services are running");
    const std::string log = ReadFile(service.log_path());
    const int started = CountLines(log, "keeper.started");
    if (started != 1) Complain(std::to_string(started) + " services were started:\n" + log);
    if (!service.Kill(SIGTERM)) Complain("the service does not end");
  }

  void CheckEngine(Program& engine, std::set<std::string>* fingerprints) {
    const ExitStatus exit = engine.Wait();
    const nlohmann::json report = engine.Json();
    if (!exit.success() || !report.is_object() || report["source"] != "attached" || report["generation"] != 1) {
      return Complain("an engine ended with " + exit.ToString() + " and " + report.dump() + "\n" + engine.Errors());
    }
    fingerprints->insert(report["fingerprint"].get<std::string>());
    attach_ms_.push_back(report["attach_seconds"].get<double>() * 1000);
  }

  const Flags flags_;
  std::mt19937 random_;
  std::vector<double> attach_ms_;
  int complaints_ = 0;
};

}  // namespace
}  // namespace weightbroker::testing

int main(int argc, char** argv) {
  weightbroker::testing::Flags flags;
  CLI::App app("Engines that race to start a service");
  app.add_option("--engines", flags.engines);
  app.add_option("--rounds", flags.rounds);
  app.add_option("--seed", flags.seed);
  app.add_option("--max_pause_ms", flags.max_pause_ms);
  CLI11_PARSE(app, argc, argv);
  printf("seed %u\n", flags.seed);
  return weightbroker::testing::Race(flags).Run();
}
