// One sample of gpu_attach_bench: a fresh engine process on its way to its weights, with the time of every step.
//
//   gpu_attach_sample --how attach --kind CUDA_VMM_FD --socket S --model M ...      by the client library
//   gpu_attach_sample --how tensors --handles FILE ...                             by one CUDA IPC handle a tensor
//
// With --barrier it prints "ready" once it has all that an attach needs, and goes on after a line of its input.
//
// Prints JSON: seconds since the process was asked for (`--started_at`, of CLOCK_MONOTONIC) at the end of each step,
// and the checksum. Compiled with torch as well (WEIGHTBROKER_BENCH_TORCH): then every tensor becomes a torch::Tensor.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/bench_support.h"
#include "bench/gpu/page_toucher.h"
#include "bench/gpu/tensor_handles.h"
#include "bench/gpu/torch_step.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/device/cuda_context.h"
#include "weightbroker/client.h"

namespace weightbroker::bench {
namespace {

constexpr size_t kMostTensors = 200'000;

struct Flags {
  std::string how;
  std::string kind = "CUDA_VMM_FD";
  std::string socket;
  std::string model;
  std::string handles;
  std::string image;
  double started_at = 0;
  size_t tensors = 0;
  int rank = 0;
  int tensor_parallel = 1;
  std::string layout;
  std::string sizes;
  bool barrier = false;
  bool verify = false;
};

absl::Status ToAbsl(const Status& status) {
  return status.ok() ? absl::OkStatus() : MakeError(Reason::kSystemError, status.ToString());
}

class Sample {
 public:
  explicit Sample(const Flags& flags) : flags_(flags) {}

  absl::StatusOr<nlohmann::ordered_json> Run() {
    Mark("exec");
    ASSIGN_OR_RETURN(CudaDriver* const driver, LoadCudaDriver());
    Mark("cu_init");
    ASSIGN_OR_RETURN(const CudaContext context, CudaContext::Retain(*driver, /*device=*/0));
    StartTorch();
    Mark("context");
    ASSIGN_OR_RETURN(const PageToucher toucher, PageToucher::Create(context, flags_.image, MostTensors()));
    Mark("kernel_loaded");  // no part of an engine's start: the clock of all arms stands still for it
    ranges_.reserve(MostTensors());
    RETURN_IF_ERROR(flags_.how == "attach" ? Attach() : OpenTensors(context));
    if (flags_.tensors > 0 && ranges_.size() != flags_.tensors) {
      return MakeError(Reason::kProtocolError, absl::StrCat(ranges_.size(), " tensors instead of ", flags_.tensors));
    }
    ASSIGN_OR_RETURN(const uint64_t sum, toucher.Touch(ranges_));
    Mark("touched");
    times_["checksum"] = absl::StrCat(absl::Hex(sum, absl::kZeroPad16));
    times_["tensors"] = ranges_.size();
    if (flags_.verify) RETURN_IF_ERROR(ToAbsl(attached_->Verify()));
    if (!flags_.sizes.empty()) WriteSizes();
    return times_;
  }

 private:
  size_t MostTensors() const { return flags_.tensors > 0 ? flags_.tensors : kMostTensors; }

  // All that attach at once do so after this.
  void Connected() {
    Mark("connected");
    if (!flags_.barrier) return;
    std::cout << "ready" << std::endl;
    std::string line;
    std::getline(std::cin, line);
    Mark("connected");
  }

  // For another process that is to hold as many tensors of the same lengths.
  void WriteSizes() const {
    nlohmann::json sizes;
    for (const DeviceRange& range : ranges_) sizes.push_back({{"path", nullptr}, {"size_bytes", range.size_bytes}});
    std::ofstream(flags_.sizes) << sizes;
  }

  void Mark(const char* step) { times_[step] = NowSeconds() - flags_.started_at; }

  absl::Status Attach() {
    ClientOptions options;
    options.mode = Mode::kClient;
    options.torch_version = "any";
    options.socket_path = flags_.socket;
    const Result<Client> client = Client::Create(options);
    if (!client.ok()) return ToAbsl(client.status());
    RETURN_IF_ERROR(ToAbsl(client->WaitUntilConnected(std::chrono::seconds(10))));
    Connected();
    WeightSpec spec;
    spec.model = flags_.model;
    spec.tensor_parallel_size = flags_.tensor_parallel;
    spec.layout = flags_.layout;
    AttachOptions attach;
    attach.fallback = Fallback::kFail;
    attach.cuda_device = 0;
    attach.rank = flags_.rank;
    attach.handle_kinds = {flags_.kind == "CUDA_IPC" ? HandleKind::kCudaIpc : HandleKind::kCudaVmmFd};
    attached_ = client->Attach(spec, attach);
    Mark("pointers");
    if (!attached_.ok()) return ToAbsl(attached_.status());
    const AttachTimes& parts = attached_->attach_times();
    times_["attach_parts"] = {
        {"header", parts.header_seconds}, {"manifest", parts.manifest_seconds}, {"mapped", parts.mapped_seconds}};
    RETURN_IF_ERROR(ToAbsl(BindToTorch(*attached_)));
    Mark("bound");
    for (const Tensor& tensor : *attached_) {
      ranges_.push_back({reinterpret_cast<CudaDevicePtr>(tensor.data), tensor.size_bytes});
    }
    return absl::OkStatus();
  }

  absl::Status OpenTensors(const CudaContext& context) {
    const CudaScope current(context);
    RETURN_IF_ERROR(current.status());
    Connected();
    ASSIGN_OR_RETURN(const std::vector<TensorHandle> handles, ReadTensorHandles(flags_.handles));
    Mark("manifest");
    CudaDriver& driver = context.driver();
    for (const TensorHandle& tensor : handles) {
      CudaDevicePtr address = 0;
      const CudaResult result = driver.IpcOpenMemHandle(tensor.handle, kCudaIpcLazyPeerAccess, &address);
      if (result != kCudaSuccess) return CudaError(driver, result, "cuIpcOpenMemHandle", "opening a tensor's handle");
      ranges_.push_back({address, tensor.size_bytes});
    }
    Mark("pointers");
    Mark("bound");
    return absl::OkStatus();
  }

  const Flags& flags_;
  nlohmann::ordered_json times_;
  Result<MappedWeights> attached_ = Status(StatusCode::kUnknown, "SYSTEM_ERROR", "not attached yet");
  std::vector<DeviceRange> ranges_;
};

}  // namespace
}  // namespace weightbroker::bench

int main(int argc, char** argv) {
  weightbroker::bench::Flags flags;
  CLI::App app("Takes one sample of gpu_attach_bench.");
  app.add_option("--how", flags.how)->required()->check(CLI::IsMember({"attach", "tensors"}));
  app.add_option("--kind", flags.kind)->check(CLI::IsMember({"CUDA_VMM_FD", "CUDA_IPC"}));
  app.add_option("--socket", flags.socket);
  app.add_option("--model", flags.model);
  app.add_option("--handles", flags.handles);
  app.add_option("--image", flags.image)->required();
  app.add_option("--started_at", flags.started_at)->required();
  app.add_option("--tensors", flags.tensors, "How many there must be; 0: any number");
  app.add_option("--rank", flags.rank);
  app.add_option("--tp", flags.tensor_parallel);
  app.add_option("--layout", flags.layout);
  app.add_option("--sizes", flags.sizes, "A file for the tensors' lengths, as torch_export.py takes them");
  app.add_flag("--barrier", flags.barrier, "Wait for a line before attaching");
  app.add_flag("--verify", flags.verify, "In the end, every digest");
  CLI11_PARSE(app, argc, argv);
  const auto times = weightbroker::bench::Sample(flags).Run();
  if (!times.ok()) {
    std::cerr << times.status().message() << "\n";
    return 1;
  }
  std::cout << times->dump() << std::endl;
  return 0;
}
