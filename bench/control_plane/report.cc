#include "bench/control_plane/report.h"

#include <cstdio>
#include <string>

namespace weightbroker::bench {
namespace {

using nlohmann::json;

double Median(const json& summary) { return summary["median"].get<double>(); }

void PrintUnary(const json& unary) {
  printf("%-26s %10s %10s\n", "microseconds a call", "p50", "p99");
  for (const char* const call : {"health", "grpc_echo", "raw_echo", "fingerprint", "fingerprint_stat_calls"}) {
    printf("%-26s %10.1f %10.1f\n", call, Median(unary["p50_us"][call]), Median(unary["p99_us"][call]));
  }
  const json& ratio = unary["health_to_echo_p50"];
  printf("Health to the bare gRPC echo, p50: %.3f (blocks from %.3f to %.3f)\n", Median(ratio),
         ratio["least"].get<double>(), ratio["greatest"].get<double>());
}

void PrintManifests(const json& manifests) {
  printf("\n%-26s %10s %10s %10s\n", "Export to any name, ms", "p50", "p90", "least");
  for (const json& manifest : manifests) {
    const json& total = manifest["attach_seconds"];
    printf("%-26lld %10.2f %10.2f %10.2f\n", static_cast<long long>(manifest["tensors"].get<int64_t>()),
           Median(total) * 1e3, total["p90"].get<double>() * 1e3, total["least"].get<double>() * 1e3);
  }
  printf("\n%-14s", "step, p50 ms");
  for (const json& manifest : manifests) {
    printf(" %10lld", static_cast<long long>(manifest["tensors"].get<int64_t>()));
  }
  printf("\n");
  for (const char* const step : {"connect", "header", "tickets", "map", "receive", "decode", "finish"}) {
    printf("%-14s", step);
    for (const json& manifest : manifests) printf(" %10.3f", Median(manifest["step_seconds"][step]) * 1e3);
    printf("\n");
  }
  printf("%-14s", "lookup, ns");
  for (const json& manifest : manifests) printf(" %10.0f", Median(manifest["step_seconds"]["lookup"]) * 1e9);
  printf("\n");
}

void PrintConcurrent(const json& runs) {
  printf("\n%-8s %8s %12s %12s %12s %12s %12s %12s\n", "clients", "errors", "Health p50", "p99 us", "echo p50",
         "p99 us", "attach p50", "p99 ms");
  for (const json& run : runs) {
    printf("%-8d %8d %12.0f %12.0f %12.0f %12.0f %12.2f %12.2f\n", run["clients"].get<int>(), run["errors"].get<int>(),
           Median(run["health_us"]), run["health_us"]["p99"].get<double>(), Median(run["grpc_echo_us"]),
           run["grpc_echo_us"]["p99"].get<double>(), Median(run["attach_seconds"]) * 1e3,
           run["attach_seconds"]["p99"].get<double>() * 1e3);
  }
}

}  // namespace

void PrintTables(const json& report) {
  PrintUnary(report["unary"]);
  PrintManifests(report["manifests"]);
  PrintConcurrent(report["concurrent"]);
}

}  // namespace weightbroker::bench
