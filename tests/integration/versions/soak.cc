// What use leaves behind: attaches and detaches, registers and unregisters again and again, and follows the memory and
// descriptors of keeper and broker and the number of metrics series, which must not go up with it.
//
//   weightbroker-soak --attaches 10000 --registers 200 --seed 1
//
// Prints the slope of each by least squares over the second half of its readings. Exits 0 if each stays under its
// bound; a run that is too short for a slope to say anything fails only if descriptors or series have become many more.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/survival/survival.h"
#include "tests/integration/versions/soak_series.h"
#include "tests/support/checkpoint_builder.h"

namespace weightbroker::testing {
namespace {

struct Flags {
  int attaches = 10'000;
  int registers = 200;
  uint32_t seed = 1;
  double max_bytes_per_attach = 512;
  double max_bytes_per_register = 8192;
};

constexpr int kReadings = 100;
constexpr uint32_t kModels = 4;
constexpr double kMostPerCycle = 0.01;  // descriptors or series
// From how many cycles on slopes are judged.
constexpr int kLongAttaches = 5000;
constexpr int kLongRegisters = 100;
// By how many descriptors or series a short run may end with more than it began with: threads and connections that come
// once; and one in so many cycles.
constexpr double kFirstUse = 8;
constexpr double kShortCycles = 20;
// A connection that is being closed is none that was left behind.
constexpr std::chrono::milliseconds kTimeToClose{2000};

double ResidentBytes(pid_t pid) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  long long kibibytes = 0;
  for (std::string line; std::getline(status, line);) sscanf(line.c_str(), "VmRSS: %lld kB", &kibibytes);
  return static_cast<double>(kibibytes) * 1024;
}

double OpenFiles(pid_t pid) {
  std::error_code error;
  const std::filesystem::directory_iterator fds("/proc/" + std::to_string(pid) + "/fd", error);
  return static_cast<double>(std::distance(fds, std::filesystem::directory_iterator()));
}

double CountSeries(const std::string& metrics) {
  double count = 0;
  std::istringstream lines(metrics);
  for (std::string line; std::getline(lines, line);) count += line.empty() || line[0] == '#' ? 0 : 1;
  return count;
}

// All that is followed over one kind of cycle.
class Readings {
 public:
  Readings(const Service& service, pid_t keeper, int metrics_port, double max_bytes)
      : service_(service),
        keeper_(keeper),
        metrics_port_(metrics_port),
        memory_{{"keeper: resident bytes", max_bytes}, {"broker: resident bytes", max_bytes}},
        counts_{{"keeper: open descriptors", kMostPerCycle},
                {"broker: open descriptors", kMostPerCycle},
                {"broker: metrics series", kMostPerCycle}} {}

  void Take(int cycle) {
    const std::vector<double> counts = CountOnceClosed();
    for (size_t i = 0; i < counts_.size(); ++i) counts_[i].Add(cycle, counts[i]);
    memory_[0].Add(cycle, ResidentBytes(keeper_));
    memory_[1].Add(cycle, ResidentBytes(BrokerOf(service_)));
  }

  // Whether all of it is flat, going by the slopes if the run was `long_enough` for them.
  bool PrintAndJudge(const std::string& what, bool long_enough) const {
    printf("%s\n", what.c_str());
    bool all_flat = true;
    for (const auto* kind : {&memory_, &counts_}) {
      for (const Series& series : *kind) all_flat = series.Print(long_enough) && all_flat;
    }
    if (long_enough) return all_flat;
    bool all_back = true;
    for (const Series& series : counts_) {
      const bool is_back = series.Growth() <= kFirstUse + series.Cycles() / kShortCycles;
      if (!is_back) printf("WRONG: %s has grown by %.0f\n", series.name().c_str(), series.Growth());
      all_back = is_back && all_back;
    }
    return all_back;
  }

 private:
  std::vector<double> Count() const {
    return {OpenFiles(keeper_), OpenFiles(BrokerOf(service_)), CountSeries(ScrapeMetrics(metrics_port_))};
  }

  // As soon as there are no more than there were, or it is plain that there will be.
  std::vector<double> CountOnceClosed() const {
    const auto give_up = std::chrono::steady_clock::now() + kTimeToClose;
    std::vector<double> counts = Count();
    while (!IsBack(counts) && std::chrono::steady_clock::now() < give_up) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      counts = Count();
    }
    return counts;
  }

  bool IsBack(const std::vector<double>& counts) const {
    for (size_t i = 0; i < counts_.size(); ++i) {
      if (!counts_[i].empty() && counts[i] > counts_[i].last()) return false;
    }
    return true;
  }

  const Service& service_;
  const pid_t keeper_;
  const int metrics_port_;
  std::vector<Series> memory_;
  std::vector<Series> counts_;
};

class Soak {
 public:
  explicit Soak(Flags flags)
      : flags_(flags),
        random_(flags.seed),
        metrics_port_(FreePort()),
        service_({"--metrics_address=127.0.0.1:" + std::to_string(metrics_port_), "--log_level=warning"}) {}

  int Run() {
    printf("seed %u\n", flags_.seed);
    for (uint32_t i = 0; i < kModels; ++i) {
      CheckpointBuilder().Tensor("layer." + std::to_string(i), "U8", {256 << 10}).Write(service_.NewModel(Name(i)));
    }
    const bool attaches_flat = Attaches();
    const bool registers_flat = Registers();
    return attaches_flat && registers_flat && !failed_ ? 0 : 1;
  }

 private:
  static std::string Name(uint32_t number) { return "m" + std::to_string(number); }

  Readings NewReadings(double max_bytes) {
    return Readings(service_, service_.program().pid(), metrics_port_, max_bytes);
  }

  void Complain(const std::string& what) {
    failed_ = true;
    printf("WRONG: %s\n", what.c_str());
  }

  static int Interval(int cycles) { return std::max(1, cycles / kReadings); }

  bool Attaches() {
    const auto set = service_.Register(Name(0));
    if (!set.ok()) Complain(set.status().ToString());
    Readings readings = NewReadings(flags_.max_bytes_per_attach);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 1; i <= flags_.attaches && !failed_; ++i) {
      AttachOnce();
      if (i % Interval(flags_.attaches) == 0) readings.Take(i);
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (!Eventually([&] { return service_.Health().value().lease_count() == 0; })) Complain("leases are left");
    if (set.ok() && !service_.Unregister(set->fingerprint(), false).ok()) Complain("the set could not be unregistered");
    return readings.PrintAndJudge(
        std::to_string(flags_.attaches) + " attaches and detaches in " + std::to_string(seconds) + " s",
        flags_.attaches >= kLongAttaches);
  }

  // Over a connection of its own each time.
  void AttachOnce() {
    const auto weights = service_.Attach(Name(0));
    if (!weights.ok()) return Complain(weights.status().ToString());
    if (random_() % 100 == 0 && !weights->Verify(1).ok()) Complain("a digest is wrong");
  }

  bool Registers() {
    Readings readings = NewReadings(flags_.max_bytes_per_register);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 1; i <= flags_.registers && !failed_; ++i) {
      const auto set = service_.Register(Name(random_() % kModels));
      if (!set.ok()) {
        Complain(set.status().ToString());
      } else if (const auto gone = service_.Unregister(set->fingerprint(), false); !gone.ok()) {
        Complain(gone.status().ToString());
      }
      // A loader that is about to end still has descriptors, and the keeper a process to wait for.
      if (!Eventually([&] { return service_.Loaders().empty(); })) Complain("a loader is left");
      if (i % Interval(flags_.registers) == 0) readings.Take(i);
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return readings.PrintAndJudge(
        std::to_string(flags_.registers) + " registers and unregisters in " + std::to_string(seconds) + " s",
        flags_.registers >= kLongRegisters);
  }

  const Flags flags_;
  std::mt19937 random_;
  const int metrics_port_;
  Service service_;
  bool failed_ = false;
};

}  // namespace
}  // namespace weightbroker::testing

int main(int argc, char** argv) {
  weightbroker::testing::Flags flags;
  CLI::App app("Follows what use leaves behind in a service");
  app.add_option("--attaches", flags.attaches, "Cycles of attaching and detaching")->capture_default_str();
  app.add_option("--registers", flags.registers, "Cycles of registering and unregistering")->capture_default_str();
  app.add_option("--seed", flags.seed)->capture_default_str();
  app.add_option("--max_bytes_per_attach", flags.max_bytes_per_attach, "Growth of a process's resident memory")
      ->capture_default_str();
  app.add_option("--max_bytes_per_register", flags.max_bytes_per_register, "The same, for a register and an unregister")
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return weightbroker::testing::Soak(flags).Run();
}
