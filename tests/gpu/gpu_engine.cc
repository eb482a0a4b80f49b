// An engine for tests: attaches on a GPU, then does as it is told by signals.
//
//   gpu_engine --socket S --model M [--cuda_device 0] [--kind CUDA_VMM_FD] [--register] ...
//
// Prints one line of JSON, then "attached". SIGUSR1: verifies every tensor and prints "verified 1", "verified 2", ...;
// SIGTERM: lets the weights go and ends with 0. Exit codes: 1 a digest is wrong or the GPU failed, 3 refused, 4
// unavailable, 5 the system refused to isolate it.

#include <signal.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "common/device/cuda_context.h"
#include "common/device/cuda_driver.h"
#include "tests/gpu/isolation.h"
#include "weightbroker/client.h"

namespace weightbroker::testing {
namespace {

// A thread that writes one byte, for any GPU: the driver translates it.
constexpr char kStoreKernel[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .entry store_byte(.param .u64 where)
{
  .reg .u64 %address;
  .reg .u64 %global;
  .reg .u32 %value;
  ld.param.u64 %address, [where];
  cvta.to.global.u64 %global, %address;
  mov.u32 %value, 90;
  st.global.u8 [%global], %value;
  ret;
}
)";

struct Flags {
  Isolation isolation;
  std::string socket;
  std::string model;
  std::vector<std::string> model_roots;
  std::string mode = "client";
  std::string kind;
  std::string fallback = "fail";
  std::string visible_devices;
  std::vector<std::string> devices;
  int cuda_device = 0;
  int rank = 0;
  int tensor_parallel_size = 1;
  bool register_if_missing = false;
  bool evict_unleased = false;
  bool write_fault = false;
  bool exit_with_weights = false;
};

int PrintFailure(const Status& status) {
  const nlohmann::json line = {
      {"ok", false}, {"reason", status.reason()}, {"message", status.message()}, {"metadata", status.metadata()}};
  printf("%s\n", line.dump().c_str());
  fflush(stdout);
  return status.code() == StatusCode::kUnavailable ? 4 : 3;
}

Result<MappedWeights> Attach(const Flags& flags, const std::string& socket) {
  ClientOptions options;
  options.mode = flags.mode == "off" ? Mode::kOff : Mode::kClient;
  options.torch_version = "any";
  options.socket_path = socket;
  for (const std::string& root : flags.model_roots) {
    const size_t equals = root.find('=');
    options.model_roots[root.substr(0, equals)] = root.substr(equals + 1);
  }
  const auto client = Client::Create(options);
  if (!client.ok()) return client.status();
  WeightSpec spec;
  spec.model = flags.model;
  spec.tensor_parallel_size = flags.tensor_parallel_size;
  AttachOptions attach;
  attach.fallback = flags.fallback == "disk" ? Fallback::kDisk : Fallback::kFail;
  attach.register_if_missing = flags.register_if_missing;
  attach.evict_unleased = flags.evict_unleased;
  attach.deadline = std::chrono::seconds(60);
  attach.cuda_device = flags.cuda_device;
  attach.rank = flags.rank;
  attach.devices = flags.devices;
  if (flags.kind == "CUDA_IPC") attach.handle_kinds = {HandleKind::kCudaIpc};
  if (flags.kind == "CUDA_VMM_FD") attach.handle_kinds = {HandleKind::kCudaVmmFd};
  return client->Attach(spec, attach);
}

void PrintAttached(const MappedWeights& weights) {
  const bool attached = weights.source().kind == SourceKind::kAttached;
  const nlohmann::json line = {{"ok", true},
                               {"uuid", weights.device().uuid},
                               {"ordinal", weights.device().ordinal},
                               {"source", attached ? "attached" : "disk"},
                               {"why_not_attached", attached ? "" : weights.source().why_not_attached.ToString()},
                               {"fingerprint", weights.fingerprint()},
                               {"generation", weights.generation()},
                               {"tensors", weights.tensors().size()},
                               {"bytes", weights.total_bytes()}};
  printf("%s\nattached\n", line.dump().c_str());
  fflush(stdout);
}

// Writes to the first tensor with a kernel. Returns what the driver says of it, as an exit code: 1 if the write failed,
// and 0, which no test wants, if it went through.
int WriteToWeights(const MappedWeights& weights) {
  CudaDriver& driver = **LoadCudaDriver();
  const CudaContext context = *CudaContext::Retain(driver, weights.device().ordinal);
  const CudaScope current(context);
  CudaModule module = nullptr;
  CudaFunction store = nullptr;
  CudaResult result = driver.ModuleLoadData(kStoreKernel, &module);
  if (result == kCudaSuccess) result = driver.ModuleGetFunction(module, "store_byte", &store);
  if (result != kCudaSuccess) {
    fprintf(stderr, "cannot load the kernel that writes: %s\n", driver.ErrorString(result).c_str());
    return 6;
  }
  for (const Tensor& tensor : weights) {
    if (tensor.size_bytes == 0) continue;
    CudaDevicePtr address = reinterpret_cast<CudaDevicePtr>(tensor.data);
    void* parameters[] = {&address};
    result = driver.LaunchKernel(store, {}, nullptr, parameters);
    if (result == kCudaSuccess) result = driver.CtxSynchronize();
    printf("%s\n", nlohmann::json({{"write", driver.ErrorName(result)}}).dump().c_str());
    fflush(stdout);
    return result == kCudaSuccess ? 0 : 1;
  }
  return 6;
}

int ObeySignals(const MappedWeights& weights) {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGUSR1, SIGTERM}) sigaddset(&signals, signal);
  for (int count = 1;; ++count) {
    int signal = 0;
    sigwait(&signals, &signal);
    if (signal == SIGTERM) return 0;
    if (const Status status = weights.Verify(); !status.ok()) {
      PrintFailure(status);
      return 1;
    }
    printf("verified %d\n", count);
    fflush(stdout);
  }
}

int Run(const Flags& flags, const std::string& socket) {
  auto attached = Attach(flags, socket);
  if (!attached.ok()) return PrintFailure(attached.status());
  if (flags.write_fault) return WriteToWeights(*attached);
  PrintAttached(*attached);
  if (flags.exit_with_weights) {
    // Destroyed while the process exits, after main, as a framework's globals are.
    static MappedWeights kept = *std::move(attached);
    return kept.Verify().ok() ? 0 : 1;
  }
  return ObeySignals(*attached);
}

}  // namespace
}  // namespace weightbroker::testing

int main(int argc, char** argv) {
  weightbroker::testing::Flags flags;
  CLI::App app("An engine for tests.");
  app.add_option("--socket", flags.socket);
  app.add_option("--model", flags.model)->required();
  app.add_option("--model_root", flags.model_roots);
  app.add_option("--mode", flags.mode)->check(CLI::IsMember({"off", "client"}));
  app.add_option("--kind", flags.kind)->check(CLI::IsMember({"CUDA_VMM_FD", "CUDA_IPC"}));
  app.add_option("--fallback", flags.fallback)->check(CLI::IsMember({"disk", "fail"}));
  app.add_option("--cuda_device", flags.cuda_device);
  app.add_option("--rank", flags.rank);
  app.add_option("--tp", flags.tensor_parallel_size);
  app.add_option("--devices", flags.devices)->delimiter(',');
  app.add_option("--visible_devices", flags.visible_devices, "CUDA_VISIBLE_DEVICES");
  app.add_flag("--register", flags.register_if_missing);
  app.add_flag("--evict_unleased", flags.evict_unleased);
  app.add_flag("--write_fault", flags.write_fault);
  app.add_flag("--exit_with_weights", flags.exit_with_weights);
  app.add_option("--namespaces", flags.isolation.namespaces)->delimiter(',');
  app.add_option("--hide", flags.isolation.hidden_folder, "With a mnt namespace: a folder that is empty for it");
  app.add_option("--uid", flags.isolation.uid);
  app.add_option("--gid", flags.isolation.gid);
  CLI11_PARSE(app, argc, argv);

  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGUSR1, SIGTERM}) sigaddset(&signals, signal);
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  flags.isolation.socket_path = flags.socket;
  const std::string socket = weightbroker::testing::Isolate(flags.isolation);
  setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 1);
  if (!flags.visible_devices.empty()) setenv("CUDA_VISIBLE_DEVICES", flags.visible_devices.c_str(), 1);
  return weightbroker::testing::Run(flags, socket);
}
