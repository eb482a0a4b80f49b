// What a call of ours costs beside the least that gRPC can do: Health of an idle broker, and a bare echo service on a
// Unix socket that gRPC itself listens on. Both are in processes of their own, and the client in a third.
//
//   rpc_bench --json > rpc.json
//
// Samples are taken in blocks. Each block starts all three processes afresh, since where the kernel happens to place
// threads and memory differs from start to start by more than calls differ within one; within a block the two calls
// take turns, so that whatever else the machine does hits both. The ratio is of the medians, block by block, and the
// result is the median of the blocks.
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/bare_echo.h"
#include "bench/bench_process.h"
#include "bench/bench_support.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/process/spawn.h"
#include "weightbroker/v1/weight_broker_service.grpc.pb.h"

namespace weightbroker::bench {
namespace {

using nlohmann::json;
using std::chrono::seconds;

struct Options {
  std::string broker_path;
  int blocks = 15;
  int calls = 2000;  // of each kind in a block
  int warm_up_calls = 300;
  bool as_json = false;
  // How this program starts itself as the other processes.
  std::string echo_socket;
  std::string broker_socket;
  bool as_client = false;
};

// Seconds that one call takes.
double Time(const std::function<grpc::Status(grpc::ClientContext*)>& call) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + seconds(10));
  const double start = NowSeconds();
  const grpc::Status status = call(&context);
  const double taken = NowSeconds() - start;
  if (!status.ok()) {
    fprintf(stderr, "rpc_bench: a call failed: %s\n", status.error_message().c_str());
    exit(1);
  }
  return taken;
}

// The client of one block: prints the samples of both calls, in microseconds.
int Measure(const Options& options) {
  const auto broker = v1::WeightBrokerService::NewStub(ConnectOrDie(options.broker_socket));
  const auto echo = EchoService::NewStub(ConnectOrDie(options.echo_socket));
  v1::HealthResponse health_response;
  EchoResponse echo_response;
  const auto call_health = [&](grpc::ClientContext* context) { return broker->Health(context, {}, &health_response); };
  const auto call_echo = [&](grpc::ClientContext* context) { return echo->Echo(context, {}, &echo_response); };

  json samples = {{"health", json::array()}, {"echo", json::array()}};
  for (int i = -options.warm_up_calls; i < options.calls; ++i) {
    const double health = Time(call_health) * 1e6;
    const double bare = Time(call_echo) * 1e6;
    if (i < 0) continue;
    samples["health"].push_back(health);
    samples["echo"].push_back(bare);
  }
  printf("%s\n", samples.dump().c_str());
  return 0;
}

absl::StatusOr<json> MeasureBlock(const Options& options) {
  const SocketFolder folder;
  const std::string self = OwnPath();
  const UniqueFd silence(open("/dev/null", O_WRONLY | O_CLOEXEC));
  ASSIGN_OR_RETURN(const ChildProcess broker,
                   Spawn({.path = options.broker_path,
                          .arguments = {"--socket=" + folder / "broker", "--metrics_address=", "--log_level=error"},
                          .fds = {{silence.get(), STDOUT_FILENO}}}));
  ASSIGN_OR_RETURN(const ChildProcess echo, Spawn({.path = self, .arguments = {"--serve_echo=" + folder / "echo"}}));
  ASSIGN_OR_RETURN(
      const std::string samples,
      RunAndRead({.path = self,
                  .arguments = {"--client", "--broker_socket=" + folder / "broker", "--echo_socket=" + folder / "echo",
                                absl::StrCat("--calls=", options.calls),
                                absl::StrCat("--warm_up_calls=", options.warm_up_calls)}}));
  return json::parse(samples);
}

struct Result {
  std::vector<double> health_p50;
  std::vector<double> health_p99;
  std::vector<double> echo_p50;
  std::vector<double> echo_p99;
  std::vector<double> ratio;
  json blocks = json::array();

  void Add(json block) {
    const Summary health = Summarize(block["health"].get<std::vector<double>>());
    const Summary echo = Summarize(block["echo"].get<std::vector<double>>());
    health_p50.push_back(health.median);
    health_p99.push_back(health.p99);
    echo_p50.push_back(echo.median);
    echo_p99.push_back(echo.p99);
    ratio.push_back(health.median / echo.median);
    blocks.push_back(std::move(block));
  }
};

void Print(const Options& options, const Result& result) {
  const Summary ratio = Summarize(result.ratio);
  if (options.as_json) {
    const json report = {{"benchmark", "rpc"},
                         {"machine", DescribeMachine()},
                         {"grpc_version", grpc::Version()},
                         {"calls_per_block", options.calls},
                         {"warm_up_calls", options.warm_up_calls},
                         {"health_p50_us", ToJson(Summarize(result.health_p50))},
                         {"health_p99_us", ToJson(Summarize(result.health_p99))},
                         {"echo_p50_us", ToJson(Summarize(result.echo_p50))},
                         {"echo_p99_us", ToJson(Summarize(result.echo_p99))},
                         {"p50_ratio", ToJson(ratio)},
                         {"blocks_us", result.blocks}};
    printf("%s\n", report.dump(1).c_str());
    return;
  }
  printf("%-22s %10s %10s\n", "microseconds a call", "p50", "p99");
  printf("%-22s %10.1f %10.1f\n", "Health of the broker", Summarize(result.health_p50).median,
         Summarize(result.health_p99).median);
  printf("%-22s %10.1f %10.1f\n", "bare gRPC echo", Summarize(result.echo_p50).median,
         Summarize(result.echo_p99).median);
  printf("ratio of p50: %.3f (%d blocks from %.3f to %.3f, %d calls of each in a block)\n", ratio.median,
         options.blocks, ratio.least, ratio.greatest, options.calls);
}

int RunBlocks(const Options& options) {
  Result result;
  for (int i = 0; i < options.blocks; ++i) {
    auto block = MeasureBlock(options);
    if (!block.ok()) {
      fprintf(stderr, "rpc_bench: %s\n", block.status().ToString().c_str());
      return 1;
    }
    result.Add(*std::move(block));
  }
  Print(options, result);
  return 0;
}

int Main(int argc, char** argv) {
  Options options;
  std::string serve_echo;
  CLI::App app("Measures Health of a broker beside a bare gRPC echo");
  app.add_option("--broker_path", options.broker_path, "Default: weightbroker-broker beside this program");
  app.add_option("--blocks", options.blocks, "Blocks, each with fresh processes")->check(CLI::Range(1, 1000));
  app.add_option("--calls", options.calls, "Calls of each kind in a block")->check(CLI::Range(1, 1'000'000));
  app.add_option("--warm_up_calls", options.warm_up_calls, "Calls before them")->check(CLI::Range(0, 1'000'000));
  app.add_flag("--json", options.as_json, "Print everything as JSON, raw samples too");
  const char* internal = "";  // an empty group hides an option from the help
  app.add_option("--serve_echo", serve_echo)->group(internal);
  app.add_flag("--client", options.as_client)->group(internal);
  app.add_option("--broker_socket", options.broker_socket)->group(internal);
  app.add_option("--echo_socket", options.echo_socket)->group(internal);
  CLI11_PARSE(app, argc, argv);

  if (!serve_echo.empty()) return ServeGrpcEcho(serve_echo);
  if (options.as_client) return Measure(options);
  if (options.broker_path.empty()) options.broker_path = PathBesideThisProgram("weightbroker-broker").value();
  return RunBlocks(options);
}

}  // namespace
}  // namespace weightbroker::bench

int main(int argc, char** argv) { return weightbroker::bench::Main(argc, argv); }
