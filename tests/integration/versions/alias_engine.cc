// An engine that attaches by an alias, checks that what it got is one whole version, leaves, and begins anew, until
// SIGTERM. Every word of a version says which it is; the flags say which fingerprint has which. It prints "attached"
// the first time, and in the end what it has seen, as one line of JSON.

#include <signal.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>

#include "tests/support/engine_client.h"
#include "weightbroker/client.h"

namespace weightbroker::testing {
namespace {

volatile sig_atomic_t stopped = 0;

struct Flags {
  std::string socket;
  std::string alias;
  std::map<std::string, uint64_t> versions;  // by fingerprint
  uint32_t seed = 1;
  int deadline_ms = 30'000;
};

class Engine {
 public:
  explicit Engine(Flags flags) : flags_(std::move(flags)), random_(flags_.seed), client_(EngineClient(flags_.socket)) {}

  void Run() {
    while (stopped == 0) AttachOnce();
  }

  std::string Report() const {
    nlohmann::json report;
    report["attached"] = attached_;
    report["failures"] = failures_;
    report["mixtures"] = mixtures_;
    report["wrong_digests"] = wrong_digests_;
    report["superseded"] = superseded_.load();
    report["told_wrong"] = told_wrong_.load();
    return report.dump();
  }

 private:
  void AttachOnce() {
    AttachOptions options;
    options.fallback = Fallback::kFail;
    options.alias = flags_.alias;
    options.deadline = std::chrono::milliseconds(flags_.deadline_ms);
    options.on_lease_event = [this](const LeaseEvent& event) { OnLeaseEvent(event); };
    const auto weights = client_.Attach({}, options);
    if (!weights.ok()) {
      failures_.emplace(weights.status().reason(), weights.status().message());
      return;
    }
    const uint64_t version = flags_.versions[weights->fingerprint()];
    if (attached_.empty()) Say("attached");
    ++attached_[std::to_string(version)];
    if (!IsWholly(*weights, version)) ++mixtures_;
    if (!weights->Verify(1).ok()) ++wrong_digests_;
    // Some hold on for a while, to be told when the alias moves on; and what they have must stay as it is.
    if (random_() % 8 != 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(random_() % 50));
    if (!IsWholly(*weights, version)) ++mixtures_;
  }

  static void Say(const char* line) {
    printf("%s\n", line);
    fflush(stdout);
  }

  void OnLeaseEvent(const LeaseEvent& event) {
    if (event.kind != LeaseEvent::Kind::kSuperseded) return;
    ++superseded_;
    if (event.alias != flags_.alias || flags_.versions.count(event.fingerprint) == 0) ++told_wrong_;
  }

  static bool IsWholly(const MappedWeights& weights, uint64_t version) {
    if (version == 0) return false;  // a fingerprint that nobody knows
    for (const Tensor& tensor : weights) {
      const auto* const bytes = reinterpret_cast<const char*>(tensor.data);
      for (int64_t at = 0; at + static_cast<int64_t>(sizeof(version)) <= tensor.size_bytes; at += sizeof(version)) {
        if (memcmp(bytes + at, &version, sizeof(version)) != 0) return false;
      }
    }
    return weights.begin() != weights.end();
  }

  Flags flags_;
  std::mt19937 random_;
  Client client_;
  std::map<std::string, int64_t> attached_;      // by version
  std::map<std::string, std::string> failures_;  // the first of each reason
  int64_t mixtures_ = 0;
  int64_t wrong_digests_ = 0;
  std::atomic<int64_t> superseded_{0};
  std::atomic<int64_t> told_wrong_{0};
};

}  // namespace
}  // namespace weightbroker::testing

int main(int argc, char** argv) {
  weightbroker::testing::Flags flags;
  std::string first;
  std::string second;
  CLI::App app("An engine that attaches by an alias");
  app.add_option("--socket", flags.socket)->required();
  app.add_option("--alias", flags.alias)->required();
  app.add_option("--first", first, "The fingerprint of version 1")->required();
  app.add_option("--second", second, "The fingerprint of version 2")->required();
  app.add_option("--seed", flags.seed);
  app.add_option("--deadline_ms", flags.deadline_ms);
  CLI11_PARSE(app, argc, argv);
  flags.versions = {{first, 1}, {second, 2}};
  signal(SIGTERM, [](int) { weightbroker::testing::stopped = 1; });
  weightbroker::testing::Engine engine(flags);
  engine.Run();
  printf("%s\n", engine.Report().c_str());
  return 0;
}
