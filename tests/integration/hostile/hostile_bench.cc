// weightbroker-hostile-bench: how long Health and an attach take a good client, quiet and under each attack, in one run
// against one service. Prints a line for each attack and, last, one JSON value with all of them. Run as root, the
// attacker is another user. The good client is the generated stub and redeem.h, so that nothing of a library's patience
// hides what the service does.

#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "client/include/weightbroker/redeem.h"
#include "common/process/spawn.h"
#include "tests/integration/hostile/attacks.h"
#include "weightbroker/v1/weight_broker_service.grpc.pb.h"

namespace weightbroker::testing {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

constexpr int kTensors = 6000;  // a manifest that no socket's buffer holds
constexpr int kTensorBytes = 256;

struct Flags {
  int milliseconds = 6000;  // of each attack, and of each quiet time before one
  uint32_t seed = 1;
  int uid = 65534;
  std::string only;
};

// By an exception, so that the service that was started is stopped on the way to main.
[[noreturn]] void Fail(const std::string& what) { throw std::runtime_error(what); }

std::string Beside(const std::string& program) {
  auto path = PathBesideThisProgram(program);
  if (!path.ok()) Fail(std::string(path.status().message()));
  return *path;
}

void WriteModel(const std::string& folder) {
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/config.json") << R"({"model_type": "llama"})";
  Json header = Json::object();
  for (int i = 0; i < kTensors; ++i) {
    header["layer." + std::to_string(i) + ".weight"] = {
        {"dtype", "BF16"}, {"shape", {kTensorBytes / 2}}, {"data_offsets", {i * kTensorBytes, (i + 1) * kTensorBytes}}};
  }
  const std::string text = header.dump();
  std::ofstream file(folder + "/model.safetensors", std::ios::binary);
  for (uint64_t size = text.size(), i = 0; i < 8; ++i) file.put(static_cast<char>(size >> (8 * i)));
  file << text << std::string(static_cast<size_t>(kTensors) * kTensorBytes, '\1');
}

// A service with one resident set, in a folder of its own that any user may look into. Gone at the end.
class RunningService {
 public:
  RunningService() {
    char name[] = "/tmp/hostile-bench-XXXXXX";
    if (mkdtemp(name) == nullptr) Fail("no folder can be made in /tmp");
    folder_ = name;
    std::filesystem::permissions(folder_, std::filesystem::perms(0755));
    WriteModel(folder_ + "/models/m");
    auto child = Spawn(
        {.path = Beside("weightbrokerd"),
         .arguments = {"--socket=" + socket(), "--socket_mode=0666", "--admin_uids=root", "--write_timeout=2s",
                       "--metrics_address=", "--log_level=error", "--model_roots=models=" + folder_ + "/models"}});
    if (!child.ok()) Fail(std::string(child.status().message()));
    keeper_.emplace(*std::move(child));
    channel_ = grpc::CreateChannel("unix:" + socket(), grpc::InsecureChannelCredentials());
    if (!channel_->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(30))) {
      Fail("the service does not answer");
    }
    stub_ = v1::WeightBrokerService::NewStub(channel_);
    fingerprint_ = Register();
  }
  ~RunningService() {
    (void)keeper_->Kill(SIGTERM);
    (void)keeper_->Wait(std::chrono::seconds(10));
    std::error_code gone_already;  // the broker takes its socket away at the same time
    std::filesystem::remove_all(folder_, gone_already);
  }

  std::string socket() const { return folder_ + "/s.sock"; }
  const std::string& fingerprint() const { return fingerprint_; }
  v1::WeightBrokerService::Stub& stub() { return *stub_; }

 private:
  std::string Register() {
    grpc::ClientContext context;
    v1::RegisterRequest request;
    request.mutable_spec()->set_model("models:m");
    request.mutable_environment()->set_torch_version("any");
    request.set_wait(true);
    const auto reader = stub_->Register(&context, request);
    v1::RegisterResponse response;
    while (reader->Read(&response)) {
    }
    const grpc::Status status = reader->Finish();
    if (!status.ok() || !response.has_weight_set()) Fail("Register: " + status.error_message());
    return response.weight_set().fingerprint();
  }

  std::string folder_;
  std::optional<ChildProcess> keeper_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::WeightBrokerService::Stub> stub_;
  std::string fingerprint_;
};

struct Quantiles {
  size_t samples = 0;
  size_t failures = 0;
  double p50_ms = 0;
  double p99_ms = 0;
};

class GoodClient {
 public:
  explicit GoodClient(RunningService* service) : service_(service) {}

  // Until `enough`.
  Quantiles Measure(const std::function<bool()>& enough) {
    std::vector<double> times;
    Quantiles result;
    while (!enough()) {
      const auto start = Clock::now();
      const bool served = Health() && Attach();
      times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
      result.failures += served ? 0 : 1;
    }
    std::sort(times.begin(), times.end());
    result.samples = times.size();
    if (times.empty()) return result;
    result.p50_ms = times[times.size() / 2];
    result.p99_ms = times[std::min(times.size() - 1, times.size() * 99 / 100)];
    return result;
  }

 private:
  bool Health() {
    grpc::ClientContext context;
    v1::HealthResponse response;
    return service_->stub().Health(&context, {}, &response).ok();
  }

  // By spec, as engines do: the service looks at the files. Header, manifest, ticket, and a mapping; then it leaves.
  bool Attach() {
    grpc::ClientContext context;
    v1::ExportRequest request;
    request.mutable_spec()->set_model("models:m");
    request.mutable_environment()->set_torch_version("any");
    request.set_hold(true);
    const auto reader = service_->stub().Export(&context, request);
    v1::ExportResponse response;
    bool served = reader->Read(&response) && response.has_header() && Map(response.header());
    int64_t left = response.header().tensor_count();
    while (served && left > 0) {
      served = reader->Read(&response);
      left -= response.manifest().tensors_size();
    }
    context.TryCancel();
    while (reader->Read(&response)) {
    }
    (void)reader->Finish();
    return served;
  }

  bool Map(const v1::ExportHeader& header) {
    int fd = -1;
    size_t count = 0;
    const int error = RedeemTicket(service_->socket().c_str(), header.ticket().data(), header.ticket().size(), &fd, 1,
                                   &count, 10'000, nullptr, 0);
    if (error != 0 || count != 1) return false;
    const auto size = static_cast<size_t>(header.slabs(0).size_bytes());
    void* const data = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (data == MAP_FAILED) return false;
    munmap(data, size);
    return true;
  }

  RunningService* const service_;
};

// The attacker, in a process of its own, whose report is a file.
class Attacker {
 public:
  Attacker(const RunningService& service, const Attack& attack, const Flags& flags)
      : report_(service.socket() + "." + attack.name) {
    std::string command = Beside("weightbroker-hostile") + " --socket " + service.socket() + " --attack " +
                          attack.name + " --fingerprint " + service.fingerprint() + " --seed " +
                          std::to_string(flags.seed) + " --milliseconds " + std::to_string(flags.milliseconds);
    if (geteuid() == 0) command += " --uid " + std::to_string(flags.uid);
    auto child = Spawn({.path = "/bin/sh", .arguments = {"-c", "exec " + command + " > " + report_}});
    if (!child.ok()) Fail(std::string(child.status().message()));
    child_.emplace(*std::move(child));
  }

  bool HasEnded() { return child_->Wait(std::chrono::milliseconds(0)).ok(); }

  Json Report() const {
    std::ifstream file(report_);
    return Json::parse(file, nullptr, /*allow_exceptions=*/false);
  }

 private:
  const std::string report_;
  std::optional<ChildProcess> child_;
};

Json ToJson(const Quantiles& quantiles) {
  return {{"samples", quantiles.samples},
          {"failures", quantiles.failures},
          {"p50_ms", quantiles.p50_ms},
          {"p99_ms", quantiles.p99_ms}};
}

Json MeasureUnder(const Attack& attack, const Flags& flags, const std::function<std::function<bool()>()>& for_a_while,
                  RunningService* service, GoodClient* good) {
  const Quantiles quiet = good->Measure(for_a_while());
  std::optional<Attacker> attacker;
  attacker.emplace(*service, attack, flags);
  Json reports = Json::array();
  // An attack that is over soon begins anew, so that each is measured for as long.
  const Quantiles hostile = good->Measure([&, enough = for_a_while()] {
    if (!attacker->HasEnded()) return false;
    reports.push_back(attacker->Report());
    const bool over = enough();
    if (!over) attacker.emplace(*service, attack, flags);
    return over;
  });
  const double ratio = quiet.p99_ms > 0 ? hostile.p99_ms / quiet.p99_ms : 0;
  printf(
      "%-18s quiet p50 %7.3f p99 %7.3f ms, attacked p50 %7.3f p99 %7.3f ms, p99 x %.2f, failures %zu, %zu attacks, the "
      "last %s\n",
      attack.name, quiet.p50_ms, quiet.p99_ms, hostile.p50_ms, hostile.p99_ms, ratio, hostile.failures, reports.size(),
      reports.back().dump().c_str());
  fflush(stdout);
  return {{"attack", attack.name},       {"what", attack.what}, {"quiet", ToJson(quiet)},
          {"attacked", ToJson(hostile)}, {"p99_ratio", ratio},  {"attackers", reports}};
}

Json Run(const Flags& flags) {
  RunningService service;
  GoodClient good(&service);
  const auto for_a_while = [&]() -> std::function<bool()> {
    return [end = Clock::now() + std::chrono::milliseconds(flags.milliseconds)] { return Clock::now() >= end; };
  };
  good.Measure(for_a_while());  // what is done once only
  Json results = Json::array();
  for (const Attack& attack : Attacks()) {
    if (!flags.only.empty() && flags.only != attack.name) continue;
    results.push_back(MeasureUnder(attack, flags, for_a_while, &service, &good));
  }
  return {{"bench", "hostile"},
          {"seed", flags.seed},
          {"milliseconds", flags.milliseconds},
          {"cores", std::thread::hardware_concurrency()},
          {"attacks", results}};
}

}  // namespace
}  // namespace weightbroker::testing

int main(int argc, char** argv) {
  CLI::App app("Times a good client beside hostile ones.");
  weightbroker::testing::Flags flags;
  app.add_option("--milliseconds", flags.milliseconds, "Of each attack")->capture_default_str();
  app.add_option("--seed", flags.seed)->capture_default_str();
  app.add_option("--uid", flags.uid, "Whom the attacker is to be, where this runs as root")->capture_default_str();
  app.add_option("--only", flags.only, "One attack");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  try {
    printf("%s\n", weightbroker::testing::Run(flags).dump().c_str());
  } catch (const std::runtime_error& error) {
    fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
