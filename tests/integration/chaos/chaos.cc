// Kills and stops whatever of the service can be killed and stopped, at random moments, under engines that attach,
// verify, publish and leave, and beside an operator who loads and releases models. Shows that nobody saw a wrong byte,
// that what was resident could be attached all the time, that a dead engine's lease was gone and a dead broker's
// successor answered soon, and that nothing is left in the end: no lease, descriptor, memory or process.
//
//   weightbroker-chaos --events 1000 --engines 8 --seed 1 --max_p50_ms 50 --max_ms 250 --max_lease_ms 20
//
// With --gpu the engines' own models and what the operator loads are in the memory of the first GPU, one model has an
// exporter that is killed like everything else, and no memory of the GPU may be left in the end.
//
// Exits 0 if all of that is so. Times are printed, and judged only with --max_...: what a machine that is busy with
// something else needs says little. The last line is JSON.

#include <poll.h>
#include <signal.h>
#include <time.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "common/device/gpu_inventory.h"
#include "tests/integration/chaos/churn.h"
#include "tests/integration/chaos/holdings.h"
#include "tests/integration/chaos/tally.h"
#include "tests/integration/survival/survival.h"
#include "tests/support/checkpoint_builder.h"

namespace weightbroker::testing {
namespace {

using std::chrono::milliseconds;

struct Flags {
  int events = 1000;
  int engines = 8;
  uint32_t seed = 1;
  bool gpu = false;
  int max_pause_ms = 100;  // between the end of an event and the next one
  double max_p50_ms = 0;
  double max_ms = 0;
  double max_lease_ms = 0;
};

constexpr int kTensors = 4;
constexpr int64_t kTensorBytes = 1 << 20;
constexpr char kProbeDeadlineMs[] = "10000";
constexpr char kExported[] = "exported";
constexpr int64_t kChurnBytes[] = {int64_t{32} << 20, int64_t{256} << 20};

double NowMs() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
}

double Quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1))];
}

nlohmann::ordered_json Quantiles(const std::vector<double>& values) {
  return {{"samples", values.size()},
          {"p50_ms", Quantile(values, 0.5)},
          {"p99_ms", Quantile(values, 0.99)},
          {"max_ms", Quantile(values, 1)}};
}

// One place for an engine: who has it, and what all who had it have done.
struct Seat {
  std::string model;
  std::string fingerprint;  // of the model that only this seat's engines attach to
  std::string tally_path;
  Tally* tally = nullptr;
  std::unique_ptr<Program> engine;
};

class Chaos {
 public:
  explicit Chaos(Flags flags)
      : flags_(flags),
        random_(flags.seed),
        // So that a broker that is stopped is sometimes found to hang, and sometimes goes on.
        service_({"--broker_ping_interval=100ms", "--broker_ping_timeout=1s", "--log_level=warning"}) {}

  int Run() {
    if (!Prepare()) return 1;
    const Holdings before = Holds();
    std::vector<std::string> kept = {shared_fingerprint_};
    for (const Seat& seat : seats_) kept.push_back(seat.fingerprint);
    Churn churn(service_, {.models = churn_models_,
                           .kept = kept,
                           .gpu_uuid = gpu_uuid_,
                           .exported_model = flags_.gpu ? Service::Model(kExported) : "",
                           .exported_folder = service_.ModelFolder(kExported),
                           .seed = flags_.seed + 1});
    for (Seat& seat : seats_) SitDown(seat);
    for (int i = 0; i < flags_.events; ++i) {
      std::this_thread::sleep_for(milliseconds(Below(flags_.max_pause_ms + 1)));
      CauseOne();
      for (Seat& seat : seats_) LookAfter(seat);
    }
    StopAll(churn);
    CheckWhatIsLeft(before);
    Report(churn);
    return complaints_ == 0 ? 0 : 1;
  }

  // After Run.
  bool InTime() const {
    const auto within = [](double limit, double value) { return limit == 0 || value <= limit; };
    return within(flags_.max_p50_ms, Quantile(answer_ms_, 0.5)) && within(flags_.max_ms, Quantile(answer_ms_, 1)) &&
           within(flags_.max_lease_ms, Quantile(lease_ms_, 1));
  }

 private:
  uint32_t Below(int limit) { return random_() % static_cast<uint32_t>(limit); }

  void Complain(const std::string& what) {
    ++complaints_;
    printf("WRONG: %s\n", what.c_str());
    fflush(stdout);
  }

  // ---- Before.

  bool Prepare() {
    if (flags_.gpu && !FindGpu()) return false;
    seats_.resize(static_cast<size_t>(flags_.engines));
    shared_fingerprint_ = Load("shared", v1::HANDLE_KIND_HOST_MEMFD);
    WriteModel(kExported);
    for (size_t i = 0; i < seats_.size(); ++i) {
      const std::string name = "own-" + std::to_string(i);
      seats_[i].model = Service::Model(name);
      seats_[i].fingerprint = Load(name, flags_.gpu ? v1::HANDLE_KIND_CUDA_VMM_FD : v1::HANDLE_KIND_HOST_MEMFD);
      seats_[i].tally_path = tallies_ / name;
      seats_[i].tally = MapTally(seats_[i].tally_path);
      if (seats_[i].fingerprint.empty()) return false;
    }
    for (const int64_t bytes : kChurnBytes) {
      const std::string name = "churn-" + std::to_string(bytes);
      WriteSparseModel(service_.NewModel(name), bytes);
      churn_models_.push_back(Service::Model(name));
    }
    // A loader that is about to end still has descriptors of what it has loaded.
    return !shared_fingerprint_.empty() && Eventually([&] { return service_.Loaders().empty(); });
  }

  bool FindGpu() {
    auto inventory = OpenNvml();
    const auto gpus = inventory.ok() ? (*inventory)->List() : inventory.status();
    if (!gpus.ok() || gpus->empty()) {
      Complain("there is no GPU: " + gpus.status().ToString());
      return false;
    }
    inventory_ = *std::move(inventory);
    gpu_uuid_ = gpus->front().uuid;
    setenv("CUDA_VISIBLE_DEVICES", gpu_uuid_.c_str(), 1);  // for the engines
    return true;
  }

  // Each model's tensors have names, and so bytes, of their own.
  void WriteModel(const std::string& name) const {
    CheckpointBuilder builder;
    for (int i = 0; i < kTensors; ++i) builder.Tensor(name + "." + std::to_string(i), "U8", {kTensorBytes});
    builder.Write(service_.NewModel(name));
  }

  // Its fingerprint.
  std::string Load(const std::string& name, v1::HandleKind kind) {
    WriteModel(name);
    v1::RegisterRequest request;
    request.mutable_spec()->set_model(Service::Model(name));
    request.add_handle_kinds(kind);
    if (kind != v1::HANDLE_KIND_HOST_MEMFD) request.add_devices(gpu_uuid_);
    const auto set = service_.Register(request);
    if (!set.ok()) Complain(name + " could not be loaded: " + set.status().ToString());
    return set.ok() ? set->fingerprint() : "";
  }

  Holdings Holds() const { return TakeHoldings(service_, inventory_.get(), gpu_uuid_); }

  // ---- Engines.

  void SitDown(Seat& seat) {
    std::vector<std::string> flags = {"--socket",       service_.socket(),        "--own_model", seat.model,
                                      "--shared_model", Service::Model("shared"), "--tally",     seat.tally_path,
                                      "--seed",         std::to_string(random_())};
    if (flags_.gpu) flags.insert(flags.end(), {"--gpu", "--exported_model", Service::Model(kExported)});
    seat.engine = std::make_unique<Program>("weightbroker-chaos-engine", flags);
  }

  // Another one takes the place of one that has left.
  void LookAfter(Seat& seat) {
    if (seat.engine->IsRunning()) return;
    ExpectGoodEnd(seat);
    SitDown(seat);
  }

  void ExpectGoodEnd(Seat& seat) {
    const ExitStatus exit = seat.engine->Wait();
    if (!exit.success()) Complain("an engine ended with " + exit.ToString() + ": " + seat.engine->Errors());
  }

  // ---- Events.

  void CauseOne() {
    const uint32_t choice = Below(10);
    if (choice < 3) return Chance(3) ? StopBroker() : KillBroker();
    if (choice < 5 && CauseToLoader()) return;
    Seat& seat = seats_[Below(flags_.engines)];
    Chance(3) ? StopEngine(seat) : KillEngine(seat);
  }

  bool Chance(int in) { return Below(in) == 0; }

  // By another process than this one, whose first call it is.
  void KillBroker() {
    const pid_t broker = BrokerOf(service_);
    const double killed = NowMs();
    if (broker == 0 || kill(broker, SIGKILL) != 0) return Complain("there was no broker to kill");
    ++events_["broker SIGKILL"];
    const auto answered = Probe();
    if (answered == 0) return;
    answer_ms_.push_back(answered - killed);
    if (flags_.max_ms > 0 && answer_ms_.back() > flags_.max_ms) SayWhy("an answer", answer_ms_.back());
  }

  void SayWhy(const std::string& what, double took_ms) {
    printf("SLOW: %s took %.0f ms; the service's log until then ends with\n", what.c_str(), took_ms);
    const std::string log = service_.program().Errors();
    constexpr size_t kTail = 8000;
    printf("%s\n", log.substr(log.size() - std::min(log.size(), kTail)).c_str());
    fflush(stdout);
  }

  // When it was answered, in milliseconds of CLOCK_MONOTONIC; 0 if it was not.
  double Probe() {
    const Finished probe =
        RunProgram("weightbroker-fingerprint-probe", {service_.socket(), Service::Model("shared"), kProbeDeadlineMs});
    if (!probe.exit.success()) {
      Complain("a Fingerprint call failed: " + probe.errors);
      return 0;
    }
    if (probe.json["fingerprint"] != shared_fingerprint_ || !probe.json["resident"]) {
      Complain("a Fingerprint call was answered by " + probe.json.dump());
    }
    return static_cast<double>(probe.json["answered_ns"].get<int64_t>()) / 1e6;
  }

  // For a moment, or for so long that it is taken for hung.
  void StopBroker() {
    const pid_t broker = BrokerOf(service_);
    if (broker == 0 || kill(broker, SIGSTOP) != 0) return Complain("there was no broker to stop");
    ++events_["broker SIGSTOP"];
    std::this_thread::sleep_for(milliseconds(Chance(4) ? 1500 : 10 + Below(400)));
    kill(broker, SIGCONT);
    Probe();
  }

  // False if none is there, or it is spared: on a GPU loads take so long that few would ever become exporters.
  bool CauseToLoader() {
    const std::vector<pid_t> loaders = service_.Loaders();
    if (loaders.empty()) return false;
    const pid_t loader = loaders[Below(static_cast<int>(loaders.size()))];
    const bool is_exporter = flags_.gpu && IsExporter(loader);
    if (flags_.gpu && !is_exporter && !Chance(4)) return false;
    const std::string name = is_exporter ? "exporter" : "loader";
    if (!Chance(3)) {
      ++events_[name + " SIGKILL"];
      return kill(loader, SIGKILL) == 0;
    }
    ++events_[name + " SIGSTOP"];
    kill(loader, SIGSTOP);
    std::this_thread::sleep_for(milliseconds(10 + Below(300)));
    kill(loader, SIGCONT);
    return true;
  }

  // A load is what the kernel ends first where memory runs out; one that has become an exporter is not.
  static bool IsExporter(pid_t loader) {
    int score = 1000;
    std::ifstream("/proc/" + std::to_string(loader) + "/oom_score_adj") >> score;
    return score < 1000;
  }

  void StopEngine(Seat& seat) {
    ++events_["engine SIGSTOP"];
    seat.engine->Kill(SIGSTOP);
    std::this_thread::sleep_for(milliseconds(10 + Below(400)));
    seat.engine->Kill(SIGCONT);
  }

  // And sees how long its lease outlives it: of its own model nobody else has one.
  void KillEngine(Seat& seat) {
    ++events_["engine SIGKILL"];
    LeasesOn(seat.fingerprint);  // so that the way to a new broker is behind the observer
    seat.engine->Kill(SIGKILL);
    pollfd end = {.fd = seat.engine->pidfd(), .events = POLLIN, .revents = 0};
    poll(&end, 1, -1);
    const double ended = NowMs();
    const bool gone = Eventually([&] { return LeasesOn(seat.fingerprint) == 0; });
    lease_ms_.push_back(NowMs() - ended);
    if (!gone) Complain("the lease of an engine that was killed is still there");
    const ExitStatus exit = seat.engine->Wait();
    if (exit.signal != SIGKILL && !exit.success()) Complain("an engine ended with " + exit.ToString());
    SitDown(seat);
  }

  int LeasesOn(const std::string& fingerprint) {
    const auto sets = service_.ListWeightSets();
    if (!sets.ok()) return -1;
    for (const auto& set : sets->weight_sets()) {
      if (set.fingerprint() == fingerprint) return set.shards(0).lease_count();
    }
    return -1;
  }

  // ---- After.

  void StopAll(Churn& churn) {
    for (Seat& seat : seats_) seat.engine->Kill(SIGTERM);
    for (Seat& seat : seats_) {
      // One that has only begun to start dies of the signal.
      if (seat.engine->Wait().signal != SIGTERM) ExpectGoodEnd(seat);
    }
    churn.Stop();
    for (const std::string& complaint : churn.complaints()) Complain(complaint);
    if (!Eventually([&] { return service_.Health().ok() && service_.Health()->lease_count() == 0; })) {
      Complain("leases are left");
    }
    // What was registered or published when its caller was killed may still be under way.
    if (!Eventually([&] { return churn.ReleaseAll() == 0; })) Complain("weight sets cannot be released");
  }

  void CheckWhatIsLeft(const Holdings& before) {
    if (!Eventually([&] { return service_.Processes().size() == 2; })) {
      Complain("the service has other processes than keeper and broker");
    }
    Holdings after;
    const auto is_back = [&] {
      after = Holds();
      return after.IsBackTo(before);
    };
    if (!Eventually(is_back)) {
      Complain("the service held " + before.ToString() + " and holds " + after.ToString());
    }
    for (const Seat& seat : seats_) ExpectRight(seat.model);
    ExpectRight(Service::Model("shared"));
    if (flags_.gpu && Sum().exported == 0) Complain("no engine has attached by CUDA IPC");
  }

  // By a process of its own, whose GPU it may be.
  void ExpectRight(const std::string& model) {
    std::vector<std::string> flags = {"--socket", service_.socket(), "--model", model,      "--torch_version",
                                      "any",      "--fallback",      "fail",    "--verify", "--json"};
    if (flags_.gpu && model != Service::Model("shared")) flags.insert(flags.end(), {"--cuda_device", "0"});
    const Finished engine = RunProgram("engine", flags);
    if (!engine.exit.success()) Complain(model + " cannot be attached and verified in the end: " + engine.errors);
  }

  Tally Sum() const {
    Tally sum;
    for (const Seat& seat : seats_) {
      sum.attached += seat.tally->attached;
      sum.verified += seat.tally->verified;
      sum.published += seat.tally->published;
      sum.compared_bytes += seat.tally->compared_bytes;
      sum.publish_failures += seat.tally->publish_failures;
      sum.exported += seat.tally->exported;
      sum.export_refusals += seat.tally->export_refusals;
      sum.left += seat.tally->left;
    }
    return sum;
  }

  void Report(const Churn& churn) const {
    const Tally sum = Sum();
    const nlohmann::ordered_json report = {{"bench", "chaos"},
                                           {"seed", flags_.seed},
                                           {"engines", flags_.engines},
                                           {"events", events_},
                                           {"attached", sum.attached},
                                           {"verified", sum.verified},
                                           {"published", sum.published},
                                           {"publish_failures", sum.publish_failures},
                                           {"attached_by_cuda_ipc", sum.exported},
                                           {"refused_by_cuda_ipc", sum.export_refusals},
                                           {"left", sum.left},
                                           {"compared_bytes", sum.compared_bytes},
                                           {"loaded", churn.loaded()},
                                           {"released", churn.released()},
                                           {"operator_refusals", churn.refusals()},
                                           {"broker_kill_to_answer", Quantiles(answer_ms_)},
                                           {"engine_exit_to_lease_gone", Quantiles(lease_ms_)},
                                           {"complaints", complaints_}};
    printf("%s\n", report.dump().c_str());
  }

  const Flags flags_;
  std::mt19937 random_;
  const TemporaryFolder tallies_;
  Service service_;
  std::unique_ptr<GpuInventory> inventory_;  // with --gpu
  std::string gpu_uuid_;
  std::string shared_fingerprint_;
  std::vector<std::string> churn_models_;
  std::vector<Seat> seats_;
  std::map<std::string, int> events_;
  std::vector<double> answer_ms_;
  std::vector<double> lease_ms_;
  int complaints_ = 0;
};

}  // namespace
}  // namespace weightbroker::testing

int main(int argc, char** argv) {
  weightbroker::testing::Flags flags;
  CLI::App app("Kills and stops whatever it can, under engines");
  app.add_option("--events", flags.events)->capture_default_str();
  app.add_option("--engines", flags.engines)->capture_default_str()->check(CLI::Range(1, 64));
  app.add_option("--seed", flags.seed)->capture_default_str();
  app.add_flag("--gpu", flags.gpu, "Weights on the first GPU, and exporters among what is killed");
  app.add_option("--max_pause_ms", flags.max_pause_ms, "Between events")->capture_default_str();
  app.add_option("--max_p50_ms", flags.max_p50_ms, "From a broker's kill to an answer");
  app.add_option("--max_ms", flags.max_ms, "The same, at most");
  app.add_option("--max_lease_ms", flags.max_lease_ms, "From an engine's end to that of its lease, at most");
  CLI11_PARSE(app, argc, argv);
  printf("seed %u\n", flags.seed);
  fflush(stdout);
  weightbroker::testing::Chaos chaos(flags);
  const int code = chaos.Run();
  if (!chaos.InTime()) printf("TOO SLOW\n");
  return code != 0 || !chaos.InTime() ? 1 : 0;
}
