// An engine of the kill storm: attaches with the client library, compares every byte with what it must be, leaves, and
// begins anew, until SIGTERM. Between SIGUSR1 and SIGUSR2 it keeps what it has attached. In the end it prints what it
// has seen, as one line of JSON.

#include <signal.h>
#include <time.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/engine_client.h"
#include "weightbroker/client.h"

namespace weightbroker::testing {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

volatile sig_atomic_t stopped = 0;
volatile sig_atomic_t holding = 0;  // keeps what it has attached, for the leases to be counted

struct Flags {
  std::string socket;
  std::string model;
  uint32_t seed = 1;
  int deadline_ms = 2000;
};

class Engine {
 public:
  explicit Engine(Flags flags) : flags_(std::move(flags)), random_(flags_.seed) {}

  void Run() {
    while (stopped == 0) {
      // Engines come as new processes and as old ones that attach again.
      if (!client_.has_value() || Chance(2)) client_.emplace(EngineClient(flags_.socket));
      AttachOnce();
    }
  }

  std::string Report() const {
    nlohmann::json report;
    report["attached"] = attach_ms_.size();
    report["failed"] = failed_;
    report["failures"] = failures_;
    report["wrong"] = wrong_;
    report["generations"] = generations_;
    report["fingerprints"] = fingerprints_;
    report["attach_ms_max"] = attach_ms_.empty() ? 0 : *std::max_element(attach_ms_.begin(), attach_ms_.end());
    report["leases_lost"] = leases_lost_;
    return report.dump();
  }

 private:
  bool Chance(uint32_t in) { return random_() % in == 0; }

  void AttachOnce() {
    WeightSpec spec;
    spec.model = flags_.model;
    AttachOptions options;
    options.fallback = Fallback::kFail;
    options.deadline = milliseconds(flags_.deadline_ms);
    const auto start = Clock::now();
    const auto weights = client_->Attach(spec, options);
    const double ms = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
    if (!weights.ok()) {
      ++failed_;
      failures_.emplace(weights.status().reason(),
                        "after " + std::to_string(ms) + " ms: " + weights.status().message());
      return;
    }
    attach_ms_.push_back(ms);
    generations_.insert(weights->generation());
    fingerprints_.insert(weights->fingerprint());
    Compare(*weights);
    if (Chance(4)) {
      std::this_thread::sleep_for(milliseconds(random_() % 200));  // and hold them for a while
      Compare(*weights);
    }
    while (holding != 0 && stopped == 0) std::this_thread::sleep_for(milliseconds(2));
    if (weights->lease_lost()) ++leases_lost_;
  }

  void Compare(const MappedWeights& weights) {
    for (const Tensor& tensor : weights) {
      const std::string& right = right_.Of(std::string(tensor.name), static_cast<size_t>(tensor.size_bytes));
      if (memcmp(right.data(), tensor.data, right.size()) != 0) ++wrong_;
    }
  }

  const Flags flags_;
  std::mt19937 random_;
  std::optional<Client> client_;
  RightBytes right_;
  std::vector<double> attach_ms_;
  std::map<std::string, std::string> failures_;  // the first of each reason
  int64_t failed_ = 0;
  std::set<int64_t> generations_;
  std::set<std::string> fingerprints_;
  int64_t wrong_ = 0;
  int64_t leases_lost_ = 0;
};

}  // namespace
}  // namespace weightbroker::testing

int main(int argc, char** argv) {
  weightbroker::testing::Flags flags;
  CLI::App app("An engine of the kill storm");
  app.add_option("--socket", flags.socket)->required();
  app.add_option("--model", flags.model)->required();
  app.add_option("--seed", flags.seed);
  app.add_option("--deadline_ms", flags.deadline_ms);
  CLI11_PARSE(app, argc, argv);
  signal(SIGUSR1, [](int) { weightbroker::testing::holding = 1; });
  signal(SIGUSR2, [](int) { weightbroker::testing::holding = 0; });
  signal(SIGTERM, [](int) { weightbroker::testing::stopped = 1; });
  weightbroker::testing::Engine engine(flags);
  engine.Run();
  printf("%s\n", engine.Report().c_str());
  return 0;
}
