// What the control plane costs: unary calls beside a bare gRPC echo and a raw socket echo; manifests of 2,000, 6,000
// and 60,000 tensors, from Export to a tensor found by name, and each step of it; 1 to 64 clients at once.
//
//   control_plane_bench --json > control-plane.json
//
// Service, echo servers and clients are processes of their own. Unary calls are measured in blocks, each with fresh
// processes, since where the kernel happens to place them differs from start to start by more than calls differ within
// one; within a block the kinds take turns. Attaches are taken from a fresh process each, the sizes taking turns.
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/bare_echo.h"
#include "bench/bench_process.h"
#include "bench/bench_support.h"
#include "bench/control_plane/arms.h"
#include "bench/control_plane/report.h"
#include "client/src/attach.h"
#include "client/src/connection.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/synthetic/model.h"

namespace weightbroker::bench {
namespace {

using nlohmann::json;

struct Options {
  int blocks = 10;
  int calls = 1000;  // of each kind in a block
  int warm_up_calls = 200;
  int rounds = 15;  // of attaches
  std::vector<int64_t> manifests = {2'000, 6'000, 60'000};
  std::vector<int> clients = {1, 2, 4, 8, 16, 32, 64};
  int calls_per_client = 100;
  int attaches_per_client = 10;
  int64_t files = 161;  // of each model
  bool as_json = false;
};

// A model with the names of a mixture of experts, whose tensors are small: what counts is how many there are.
absl::Status WriteModel(const std::string& folder, int64_t tensor_count, int64_t files) {
  ModelRequest request{.model = "qwen3_moe", .layers = 48, .experts = tensor_count / 48 / 3 + 1};
  request.numbers = {{"hidden_size", 16}, {"moe_intermediate_size", 16}, {"head_dim", 8}, {"vocab_size", 64}};
  ASSIGN_OR_RETURN(CheckpointDraft draft, DraftModel(request));
  std::vector<TensorDraft> tensors;
  for (const ShardDraft& shard : draft.shards) {
    tensors.insert(tensors.end(), shard.tensors.begin(), shard.tensors.end());
  }
  tensors.resize(static_cast<size_t>(tensor_count));
  DivideIntoShards(tensors, files, 0, &draft);
  return WriteCheckpoint(draft, folder, {});
}

// A service with models under its root, and both echo servers.
class Servers {
 public:
  absl::Status Start() {
    std::filesystem::create_directory(models());
    const UniqueFd silence(open("/dev/null", O_WRONLY | O_CLOEXEC));
    ASSIGN_OR_RETURN(const std::string daemon, PathBesideThisProgram("weightbrokerd"));
    ASSIGN_OR_RETURN(ChildProcess service,
                     Spawn({.path = daemon,
                            .arguments = {"--socket", service_socket(), "--model_roots", "bench=" + models(),
                                          "--metrics_address=", "--log_level", "error"},
                            .fds = {{silence.get(), STDOUT_FILENO}, {silence.get(), STDERR_FILENO}}}));
    ASSIGN_OR_RETURN(ChildProcess grpc_echo,
                     Spawn({.path = OwnPath(), .arguments = {"--serve_grpc_echo", grpc_echo_socket()}}));
    ASSIGN_OR_RETURN(ChildProcess raw_echo,
                     Spawn({.path = OwnPath(), .arguments = {"--serve_raw_echo", raw_echo_socket()}}));
    children_.push_back(std::move(service));
    children_.push_back(std::move(grpc_echo));
    children_.push_back(std::move(raw_echo));
    ASSIGN_OR_RETURN(connection_, client::Connection::Open({.socket_path = service_socket()}));
    return connection_->WaitUntilConnected(client::DeadlineIn(std::chrono::seconds(20)));
  }

  // Writes a model and has the service load it. Gives its fingerprint.
  absl::StatusOr<std::string> MakeResident(int64_t tensor_count, int64_t files) {
    RETURN_IF_ERROR(WriteModel(ModelFolder(tensor_count), tensor_count, files));
    v1::RegisterRequest request;
    request.mutable_spec()->set_model(ModelFolder(tensor_count));
    request.mutable_environment()->set_torch_version("any");
    request.set_wait(true);
    ASSIGN_OR_RETURN(
        const v1::WeightSet set,
        client::RegisterAndWait(*connection_, request, client::DeadlineIn(std::chrono::minutes(5)), nullptr));
    return set.fingerprint();
  }

  std::string ModelFolder(int64_t tensor_count) const { return absl::StrCat(models(), "/", tensor_count); }

  // How this program starts itself for an arm.
  SpawnOptions Arm(const std::string& arm, int64_t tensor_count, const std::string& fingerprint,
                   const std::vector<std::string>& more = {}) const {
    SpawnOptions options{.path = OwnPath(),
                         .arguments = {"--arm", arm, "--service_socket", service_socket(), "--grpc_echo_socket",
                                       grpc_echo_socket(), "--raw_echo_socket", raw_echo_socket(), "--model",
                                       ModelFolder(tensor_count), "--fingerprint", fingerprint}};
    options.arguments.insert(options.arguments.end(), more.begin(), more.end());
    return options;
  }

 private:
  std::string models() const { return folder_ / "models"; }
  std::string service_socket() const { return folder_ / "service"; }
  std::string grpc_echo_socket() const { return folder_ / "grpc"; }
  std::string raw_echo_socket() const { return folder_ / "raw"; }

  const SocketFolder folder_;
  std::shared_ptr<client::Connection> connection_;
  std::vector<ChildProcess> children_;
};

absl::StatusOr<json> RunJson(SpawnOptions options) {
  ASSIGN_OR_RETURN(const std::string text, RunAndRead(std::move(options)));
  return json::parse(text);
}

constexpr int64_t kUnaryTensors = 6'000;

absl::StatusOr<json> MeasureUnaryBlock(const Options& options) {
  Servers servers;
  RETURN_IF_ERROR(servers.Start());
  ASSIGN_OR_RETURN(const std::string fingerprint, servers.MakeResident(kUnaryTensors, options.files));
  return RunJson(
      servers.Arm("unary", kUnaryTensors, fingerprint,
                  {"--calls", absl::StrCat(options.calls), "--warm_up_calls", absl::StrCat(options.warm_up_calls)}));
}

absl::StatusOr<json> MeasureUnary(const Options& options) {
  std::map<std::string, std::vector<double>> p50;
  std::map<std::string, std::vector<double>> p99;
  std::vector<double> ratios;
  json blocks = json::array();
  for (int i = 0; i < options.blocks; ++i) {
    ASSIGN_OR_RETURN(json block, MeasureUnaryBlock(options));
    for (const auto& [call, samples] : block.items()) {
      const Summary summary = Summarize(samples.get<std::vector<double>>());
      p50[call].push_back(summary.median);
      p99[call].push_back(summary.p99);
    }
    ratios.push_back(p50["health"].back() / p50["grpc_echo"].back());
    blocks.push_back(std::move(block));
  }
  json report = {{"files", options.files}, {"health_to_echo_p50", ToJson(Summarize(ratios))}, {"blocks_us", blocks}};
  for (const auto& [call, medians] : p50) report["p50_us"][call] = ToJson(Summarize(medians));
  for (const auto& [call, slow] : p99) report["p99_us"][call] = ToJson(Summarize(slow));
  return report;
}

// What the rounds have shown of one size.
struct ManifestSamples {
  std::string fingerprint;
  std::vector<double> attaches;
  std::map<std::string, std::vector<double>> steps;
};

absl::Status TakeRound(const Servers& servers, int64_t tensors, ManifestSamples* samples) {
  ASSIGN_OR_RETURN(const json attach, RunJson(servers.Arm("attach", tensors, samples->fingerprint)));
  samples->attaches.push_back(attach["seconds"].get<double>());
  ASSIGN_OR_RETURN(const json steps, RunJson(servers.Arm("steps", tensors, samples->fingerprint)));
  for (const auto& [step, seconds] : steps.items()) samples->steps[step].push_back(seconds.get<double>());
  return absl::OkStatus();
}

absl::StatusOr<json> MeasureManifests(const Options& options) {
  Servers servers;
  RETURN_IF_ERROR(servers.Start());
  std::map<int64_t, ManifestSamples> by_size;
  for (const int64_t tensors : options.manifests) {
    ASSIGN_OR_RETURN(by_size[tensors].fingerprint, servers.MakeResident(tensors, options.files));
  }
  for (int round = 0; round < options.rounds; ++round) {
    for (auto& [tensors, samples] : by_size) RETURN_IF_ERROR(TakeRound(servers, tensors, &samples));
  }
  json report = json::array();
  for (const auto& [tensors, samples] : by_size) {
    json entry = {{"tensors", tensors}, {"attach_seconds", ToJson(Summarize(samples.attaches))}};
    for (const auto& [step, seconds] : samples.steps) entry["step_seconds"][step] = ToJson(Summarize(seconds));
    report.push_back(std::move(entry));
  }
  return report;
}

// So many clients at once, each a process.
absl::StatusOr<json> MeasureClients(const Servers& servers, const std::string& fingerprint, int count,
                                    const Options& options) {
  int start[2];
  if (pipe2(start, O_CLOEXEC) != 0) return SystemError("pipe", errno);
  const UniqueFd wait_end(start[0]);
  UniqueFd go_end(start[1]);
  std::vector<MeasuringChild> clients;
  for (int i = 0; i < count; ++i) {
    SpawnOptions arm = servers.Arm(
        "client", kUnaryTensors, fingerprint,
        {"--calls", absl::StrCat(options.calls_per_client), "--attaches", absl::StrCat(options.attaches_per_client)});
    arm.fds.push_back({wait_end.get(), kStartFd});
    ASSIGN_OR_RETURN(MeasuringChild client, MeasuringChild::Start(std::move(arm)));
    clients.push_back(std::move(client));
  }
  go_end = UniqueFd();
  std::map<std::string, std::vector<double>> samples;
  int errors = 0;
  for (MeasuringChild& client : clients) {
    ASSIGN_OR_RETURN(const std::string text, client.Finish());
    const json report = json::parse(text);
    errors += report["errors"].get<int>();
    for (const char* const what : {"health_us", "grpc_echo_us", "attach_seconds"}) {
      const auto values = report[what].get<std::vector<double>>();
      samples[what].insert(samples[what].end(), values.begin(), values.end());
    }
  }
  json report = {{"clients", count}, {"errors", errors}};
  for (auto& [what, values] : samples) report[what] = ToJson(Summarize(std::move(values)));
  return report;
}

absl::StatusOr<json> MeasureConcurrency(const Options& options) {
  Servers servers;
  RETURN_IF_ERROR(servers.Start());
  ASSIGN_OR_RETURN(const std::string fingerprint, servers.MakeResident(kUnaryTensors, options.files));
  json report = json::array();
  for (const int count : options.clients) {
    ASSIGN_OR_RETURN(json run, MeasureClients(servers, fingerprint, count, options));
    report.push_back(std::move(run));
  }
  return report;
}

absl::StatusOr<json> MeasureAll(const Options& options) {
  json report = {{"benchmark", "control_plane"},
                 {"machine", DescribeMachine()},
                 {"grpc_version", grpc::Version()},
                 {"protobuf_version", GOOGLE_PROTOBUF_VERSION},
                 {"calls_per_block", options.calls},
                 {"calls_per_client", options.calls_per_client},
                 {"attaches_per_client", options.attaches_per_client}};
  ASSIGN_OR_RETURN(report["unary"], MeasureUnary(options));
  ASSIGN_OR_RETURN(report["manifests"], MeasureManifests(options));
  ASSIGN_OR_RETURN(report["concurrent"], MeasureConcurrency(options));
  return report;
}

int RunBench(const Options& options) {
  const absl::StatusOr<json> report = MeasureAll(options);
  if (!report.ok()) {
    fprintf(stderr, "control_plane_bench: %s\n", report.status().ToString().c_str());
    return 1;
  }
  if (options.as_json) {
    printf("%s\n", report->dump(1).c_str());
  } else {
    PrintTables(*report);
  }
  return 0;
}

// How this program is started by itself; hidden from its help.
void AddInternalFlags(CLI::App& app, ArmFlags& arm, std::string& serve_grpc_echo, std::string& serve_raw_echo) {
  const char* const hidden = "";
  app.add_option("--serve_grpc_echo", serve_grpc_echo)->group(hidden);
  app.add_option("--serve_raw_echo", serve_raw_echo)->group(hidden);
  app.add_option("--arm", arm.arm)->group(hidden);
  app.add_option("--service_socket", arm.service_socket)->group(hidden);
  app.add_option("--grpc_echo_socket", arm.grpc_echo_socket)->group(hidden);
  app.add_option("--raw_echo_socket", arm.raw_echo_socket)->group(hidden);
  app.add_option("--model", arm.model)->group(hidden);
  app.add_option("--fingerprint", arm.fingerprint)->group(hidden);
  app.add_option("--attaches", arm.attaches)->group(hidden);
}

int Main(int argc, char** argv) {
  Options options;
  ArmFlags arm;
  std::string serve_grpc_echo;
  std::string serve_raw_echo;
  CLI::App app("Measures calls, attaches and many clients at once, beside a bare gRPC echo and a raw socket");
  app.add_option("--blocks", options.blocks, "Blocks of unary calls, each with fresh processes")
      ->check(CLI::PositiveNumber);
  app.add_option("--calls", options.calls, "Calls of each kind in a block")->check(CLI::PositiveNumber);
  app.add_option("--warm_up_calls", options.warm_up_calls, "Calls before them")->check(CLI::NonNegativeNumber);
  app.add_option("--rounds", options.rounds, "Attaches of each size")->check(CLI::PositiveNumber);
  app.add_option("--manifests", options.manifests, "Numbers of tensors")
      ->delimiter(',')
      ->check(CLI::Range(500, 1'000'000));
  app.add_option("--clients", options.clients, "Numbers of clients at once")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  app.add_option("--calls_per_client", options.calls_per_client, "Calls of each kind")->check(CLI::PositiveNumber);
  app.add_option("--attaches_per_client", options.attaches_per_client, "Attaches")->check(CLI::PositiveNumber);
  app.add_flag("--json", options.as_json, "Print everything as JSON, raw samples too");
  AddInternalFlags(app, arm, serve_grpc_echo, serve_raw_echo);
  CLI11_PARSE(app, argc, argv);

  if (!serve_grpc_echo.empty()) return ServeGrpcEcho(serve_grpc_echo);
  if (!serve_raw_echo.empty()) return ServeRawEcho(serve_raw_echo);
  arm.calls = options.calls;
  arm.warm_up_calls = options.warm_up_calls;
  return arm.arm.empty() ? RunBench(options) : RunArm(arm);
}

}  // namespace
}  // namespace weightbroker::bench

int main(int argc, char** argv) { return weightbroker::bench::Main(argc, argv); }
