// Kills the broker again and again, at random moments, under engines that attach, compare every byte, and leave; shows
// that nobody saw a wrong byte, another generation or a failed call, that no new broker opened a file of the model,
// that leases are counted right, and how long it took each time until a new process had its Fingerprint call answered.
//
//   weightbroker-kill-storm --kills 200 --engines 8 --seed 1
//   weightbroker-kill-storm --replace --kills 20 --engines 8     # each time by SIGTERM, for a new file of its program
//
// Exits 0 if all of that is so. The times are printed, and judged only with --max_p50_ms and --max_ms: what a machine
// that is busy with something else needs says little.

#include <signal.h>
#include <time.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/survival/survival.h"
#include "tests/support/checkpoint_builder.h"

namespace weightbroker::testing {
namespace {

using std::chrono::milliseconds;

struct Flags {
  int kills = 200;
  int engines = 8;
  uint32_t seed = 1;
  int tensors = 16;
  int max_pause_ms = 200;  // between an answer and the next kill
  bool replace = false;    // SIGTERM, with a new program in place
  double max_p50_ms = 0;
  double max_ms = 0;
};

constexpr int64_t kTensorBytes = 1 << 20;
constexpr char kDeadlineMs[] = "2000";
constexpr int kKillsBetweenCounts = 10;

int64_t NowNs() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

double Quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1))];
}

class Storm {
 public:
  explicit Storm(Flags flags)
      : flags_(flags),
        random_(flags.seed),
        metrics_port_(FreePort()),
        service_(
            {"--broker_path=" + installed_.path(), "--metrics_address=127.0.0.1:" + std::to_string(metrics_port_)}) {}

  int Run() {
    CheckpointBuilder builder;
    for (int i = 0; i < flags_.tensors; ++i) builder.Tensor("layer." + std::to_string(i), "U8", {kTensorBytes});
    builder.Write(service_.NewModel("m"));
    const auto set = service_.Register("m");
    if (!set.ok()) return Complain("the model could not be loaded: " + set.status().ToString());
    fingerprint_ = set->fingerprint();
    // A loader that is about to end still has descriptors of what it has loaded.
    Eventually([&] { return service_.Loaders().empty(); });
    const int memfds = service_.CountMemfds();
    OpenWatch watch(service_.ModelFolder("m"));

    StartEngines();
    for (int i = 0; i < flags_.kills; ++i) {
      std::this_thread::sleep_for(milliseconds(random_() % static_cast<uint32_t>(flags_.max_pause_ms + 1)));
      KillAndProbe();
      if ((i + 1) % kKillsBetweenCounts == 0) CountLeases();
    }
    StopEngines();
    for (const std::string& name : watch.Opened()) Complain(name + " of the model's folder was opened");
    CheckWhatIsLeft(memfds);
    Report();
    return complaints_ == 0 ? 0 : 1;
  }

 private:
  int Complain(const std::string& what) {
    ++complaints_;
    printf("WRONG: %s\n", what.c_str());
    return 1;
  }

  void StartEngines() {
    for (int i = 0; i < flags_.engines; ++i) {
      engines_.push_back(std::make_unique<Program>(
          "weightbroker-storm-engine",
          std::vector<std::string>{"--socket", service_.socket(), "--model", Service::Model("m"), "--seed",
                                   std::to_string(flags_.seed + 1000 + static_cast<uint32_t>(i)), "--deadline_ms",
                                   kDeadlineMs}));
    }
    std::this_thread::sleep_for(milliseconds(500));  // until they are at it
  }

  // The moment at which it was, or 0.
  int64_t EndBroker() {
    const pid_t broker = BrokerOf(service_);
    if (flags_.replace) installed_.InstallAnew();
    const int64_t ended = NowNs();
    if (broker == 0 || kill(broker, flags_.replace ? SIGTERM : SIGKILL) != 0) {
      Complain("there was no broker to end");
      return 0;
    }
    // One that drains still answers, and refuses; a bare stub does not try again.
    if (flags_.replace && !WaitForAnotherBroker(service_, broker)) Complain("no other broker came");
    return ended;
  }

  void KillAndProbe() {
    const int64_t killed = EndBroker();
    if (killed == 0) return;
    const Finished probe =
        RunProgram("weightbroker-fingerprint-probe", {service_.socket(), Service::Model("m"), kDeadlineMs});
    if (probe.exit.code != 0) return (void)Complain("a Fingerprint call failed: " + probe.errors);
    if (probe.json["fingerprint"] != fingerprint_ || !probe.json["resident"]) {
      Complain("a Fingerprint call was answered by " + probe.json.dump());
    }
    const int64_t answered = probe.json["answered_ns"];
    const int64_t started = probe.json["started_ns"];
    answer_ms_.push_back(static_cast<double>(answered - killed) / 1e6);
    call_ms_.push_back(static_cast<double>(answered - started) / 1e6);
  }

  // With every engine holding one lease: before a broker is ended, and once they have been renewed with the next.
  void CountLeases() {
    for (const auto& engine : engines_) engine->Kill(SIGUSR1);
    ExpectLeases("before");
    const pid_t broker = BrokerOf(service_);
    const int64_t ended = EndBroker();
    if (!WaitForAnotherBroker(service_, broker)) Complain("no other broker came");
    ExpectLeases("after");
    renewal_ms_.push_back(static_cast<double>(NowNs() - ended) / 1e6);
    for (const auto& engine : engines_) engine->Kill(SIGUSR2);
  }

  void ExpectLeases(const std::string& when) {
    int most = 0;
    const bool right = Eventually([&] {
      const auto health = service_.Health();
      if (!health.ok()) return false;
      most = std::max(most, health->lease_count());
      return health->lease_count() == flags_.engines &&
             health->weight_sets(0).shards(0).lease_count() == flags_.engines &&
             ReadMetric(metrics_port_, "weightbroker_leases") == flags_.engines;
    });
    if (!right)
      Complain("Health or metrics do not say " + std::to_string(flags_.engines) + " leases " + when + " an end");
    if (most > flags_.engines)
      Complain(std::to_string(most) + " leases were counted of " + std::to_string(flags_.engines));
  }

  void StopEngines() {
    for (size_t i = 0; i < engines_.size(); ++i) {
      Program& engine = *engines_[i];
      if (!engine.IsRunning()) {
        Complain("engine " + std::to_string(i) + " has died: " + engine.Wait().ToString() + "\n" + engine.Errors());
        continue;
      }
      engine.Kill(SIGTERM);
      engine.Wait();
      CheckEngine(engine.Json());
    }
  }

  void CheckEngine(const nlohmann::json& report) {
    if (!report.is_object()) return (void)Complain("an engine gave no report");
    attaches_ += report["attached"].get<int64_t>();
    attach_ms_max_ = std::max(attach_ms_max_, report["attach_ms_max"].get<double>());
    leases_lost_ += report["leases_lost"].get<int64_t>();
    if (report["leases_lost"] != 0) Complain("an engine has lost leases: " + report["leases_lost"].dump());
    for (const auto& [reason, message] : report["failures"].items()) {
      Complain("an engine could not attach, " + report["failed"].dump() + " times, the first one with " + reason + " " +
               message.get<std::string>());
    }
    if (report["wrong"] != 0) Complain("an engine has seen wrong bytes: " + report["wrong"].dump());
    for (const auto& generation : report["generations"]) {
      if (generation != 1) Complain("an engine has seen generation " + generation.dump());
    }
    for (const auto& fingerprint : report["fingerprints"]) {
      if (fingerprint != fingerprint_) Complain("an engine has seen fingerprint " + fingerprint.dump());
    }
  }

  void CheckWhatIsLeft(int memfds) {
    Eventually([&] { return service_.Health().ok() && service_.Health()->lease_count() == 0; });
    const auto health = service_.Health();
    if (!health.ok()) return (void)Complain("Health failed: " + health.status().ToString());
    if (health->lease_count() != 0) Complain(std::to_string(health->lease_count()) + " leases are left");
    if (health->weight_sets_size() != 1 || health->weight_sets(0).generation() != 1) {
      Complain("Health shows other sets than were there: " + health->ShortDebugString());
    }
    const auto weights = service_.Attach("m");
    if (!weights.ok() || service_.Health()->lease_count() != 1) Complain("a lease is not counted");
    if (service_.Processes().size() != 2) Complain("the service has other processes than keeper and broker");
    if (service_.CountMemfds() != memfds) {
      Complain("the service holds " + std::to_string(service_.CountMemfds()) + " memfds, and had " +
               std::to_string(memfds));
    }
  }

  void Report() const {
    printf(
        "%d kills, %d engines, seed %u: %lld attaches (slowest %.1f ms, %lld leases lost); from its end to "
        "a "
        "new process's answer p50 %.1f ms, p90 %.1f ms, max %.1f ms (of its call p50 %.1f ms); to every lease renewed "
        "and "
        "counted p50 %.1f ms, max %.1f ms; complaints: %d\n",
        flags_.kills, flags_.engines, flags_.seed, static_cast<long long>(attaches_), attach_ms_max_,
        static_cast<long long>(leases_lost_), Quantile(answer_ms_, 0.5), Quantile(answer_ms_, 0.9),
        Quantile(answer_ms_, 1), Quantile(call_ms_, 0.5), Quantile(renewal_ms_, 0.5), Quantile(renewal_ms_, 1),
        complaints_);
  }

 public:
  // After Run.
  bool InTime() const {
    const bool p50 = flags_.max_p50_ms == 0 || Quantile(answer_ms_, 0.5) <= flags_.max_p50_ms;
    return p50 && (flags_.max_ms == 0 || Quantile(answer_ms_, 1) <= flags_.max_ms);
  }

 private:
  const Flags flags_;
  std::mt19937 random_;
  const int metrics_port_;
  const InstalledBroker installed_;
  const Service service_;
  std::string fingerprint_;
  std::vector<std::unique_ptr<Program>> engines_;
  std::vector<double> answer_ms_;
  std::vector<double> call_ms_;
  std::vector<double> renewal_ms_;
  int64_t attaches_ = 0;
  int64_t leases_lost_ = 0;
  double attach_ms_max_ = 0;
  int complaints_ = 0;
};

}  // namespace
}  // namespace weightbroker::testing

int main(int argc, char** argv) {
  weightbroker::testing::Flags flags;
  CLI::App app("Kills the broker under engines");
  app.add_option("--kills", flags.kills);
  app.add_option("--engines", flags.engines);
  app.add_option("--seed", flags.seed);
  app.add_option("--tensors", flags.tensors, "Of 1 MiB each");
  app.add_option("--max_pause_ms", flags.max_pause_ms);
  app.add_flag("--replace", flags.replace, "End it by SIGTERM, with a new file of its program in place");
  app.add_option("--max_p50_ms", flags.max_p50_ms);
  app.add_option("--max_ms", flags.max_ms);
  CLI11_PARSE(app, argc, argv);
  printf("seed %u\n", flags.seed);
  weightbroker::testing::Storm storm(flags);
  const int code = storm.Run();
  if (!storm.InTime()) printf("TOO SLOW\n");
  return code != 0 || !storm.InTime() ? 1 : 0;
}
