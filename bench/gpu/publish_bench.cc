// How fast an engine publishes weights that are on the GPU already: the copies into the service's memory beside the
// device-to-device copy of as many bytes in large chunks, which is what the GPU can do at most; what the rest of a
// publication takes; and the same with tensors that are made in the service's memory, where nothing is copied.
//
//   publish_bench [--gib 60] [--tensors 771] [--rounds 5] [--kinds vmm,ipc] [--json]
//
// In every round each arm has its turn, the plain copy before each of them. The GPU must have room for the tensors
// twice. Bytes are counted once: what is read and written again is not more.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/bench_checkpoint.h"
#include "bench/bench_support.h"
#include "client/src/connection.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/device/cuda_context.h"
#include "common/device/gpu_inventory.h"
#include "common/memory/cuda_slab.h"
#include "common/process/spawn.h"
#include "weightbroker/client.h"

namespace weightbroker::bench {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;
constexpr int64_t kAlignmentBytes = 256;
constexpr std::chrono::seconds kPatience(120);

struct Flags {
  std::string folder = WEIGHTBROKER_BENCH_DATA "/gpu_publish";  // of a model that nobody reads
  std::string bin_dir = WEIGHTBROKER_BIN_DIR;
  double gib = 60;
  int64_t tensors = 771;  // 64 layers of 12, and 3
  int rounds = 5;
  std::vector<std::string> kinds = {"vmm", "ipc"};
  bool json = false;
};

// Where a tensor lies in the memory that it is copied from.
struct SourceTensor {
  TensorToPublish tensor;
  int64_t offset_bytes = 0;
  int64_t size_bytes = 0;
};

std::vector<SourceTensor> MakeTensors(int64_t total_bytes, int64_t count) {
  const int64_t each_bytes = total_bytes / count / kAlignmentBytes * kAlignmentBytes;
  std::vector<SourceTensor> tensors;
  for (int64_t i = 0; i < count; ++i) {
    SourceTensor one;
    one.tensor.name = absl::StrCat("model.layers.", i, ".weight");
    one.tensor.dtype = DataType::kBF16;
    one.tensor.shape = {each_bytes / 2};
    one.offset_bytes = i * each_bytes;
    one.size_bytes = each_bytes;
    tensors.push_back(std::move(one));
  }
  return tensors;
}

// As the client library answers, in our own words.
absl::Status FromPublic(const Status& status) {
  return status.ok() ? absl::OkStatus() : absl::InternalError(status.ToString());
}

class Bench {
 public:
  Bench(const Flags& flags, CudaContext context, std::string gpu_uuid)
      : flags_(flags),
        context_(std::move(context)),
        cuda_(context_.driver()),
        gpu_uuid_(std::move(gpu_uuid)),
        socket_(absl::StrCat("/tmp/publish_bench.", getpid(), ".sock")),
        tensors_(MakeTensors(static_cast<int64_t>(flags.gib * kGiB), flags.tensors)),
        total_bytes_(tensors_.back().offset_bytes + tensors_.back().size_bytes) {}

  ~Bench() {
    if (!service_.has_value()) return;
    service_->Kill(SIGTERM).IgnoreError();
    if (!service_->Wait(kPatience).ok()) service_->Kill(SIGKILL).IgnoreError();
    service_->Wait().IgnoreError();
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  absl::StatusOr<nlohmann::ordered_json> Run() {
    const CudaScope current(context_);
    RETURN_IF_ERROR(current.status());
    RETURN_IF_ERROR(StartService());
    RETURN_IF_ERROR(Check(cuda_.StreamCreate(kCudaStreamNonBlocking, &stream_), "cuStreamCreate"));
    ASSIGN_OR_RETURN(source_, CudaIpcMemory::Allocate(context_, total_bytes_));
    for (size_t i = 0; i < tensors_.size(); ++i) {
      RETURN_IF_ERROR(Fill(AddressOf(tensors_[i]), tensors_[i].size_bytes, i));
    }
    RETURN_IF_ERROR(Check(cuda_.StreamSynchronize(stream_), "cuStreamSynchronize"));
    for (int round = -1; round < flags_.rounds; ++round) {  // the first warms code and driver, and does not count
      for (const std::string& kind : flags_.kinds) {
        RETURN_IF_ERROR(RunArm(kind, "copied", round));
        RETURN_IF_ERROR(RunArm(kind, "in_place", round));
      }
    }
    return Report();
  }

 private:
  absl::Status Check(CudaResult result, const char* call) const {
    return result == kCudaSuccess ? absl::OkStatus() : CudaError(cuda_, result, call, "measuring");
  }

  CudaDevicePtr AddressOf(const SourceTensor& tensor) const {
    return source_->address() + static_cast<CudaDevicePtr>(tensor.offset_bytes);
  }

  // With bytes that are another tensor's nowhere near it.
  absl::Status Fill(CudaDevicePtr to, int64_t size_bytes, size_t index) const {
    const auto value = static_cast<uint8_t>(index * 37 + 11);
    return Check(cuda_.MemsetD8Async(to, value, static_cast<size_t>(size_bytes), stream_), "cuMemsetD8Async");
  }

  absl::Status StartService() {
    RETURN_IF_ERROR(WriteBenchCheckpoint(flags_.folder, {.total_bytes = 4096, .tensor_count = 1, .shard_count = 1}));
    ASSIGN_OR_RETURN(service_, Spawn({.path = flags_.bin_dir + "/weightbrokerd",
                                      .arguments = {"--socket", socket_, "--model_roots", "bench=" + flags_.folder,
                                                    "--metrics_address", "127.0.0.1:0", "--devices", gpu_uuid_,
                                                    "--log_level", "warning"}}));
    ASSIGN_OR_RETURN(connection_, client::Connection::Open({.socket_path = socket_}));
    return connection_->WaitUntilConnected(client::DeadlineIn(kPatience));
  }

  // What has been given back is free once the processes that held it have ended.
  absl::Status WaitForRoom() const {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    size_t free_bytes = 0;
    size_t all_bytes = 0;
    while (std::chrono::steady_clock::now() < deadline) {
      RETURN_IF_ERROR(Check(cuda_.MemGetInfo(&free_bytes, &all_bytes), "cuMemGetInfo"));
      if (static_cast<int64_t>(free_bytes) >= total_bytes_ + kGiB) return absl::OkStatus();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return MakeError(Reason::kMemoryExhausted, absl::StrCat("only ", free_bytes, " bytes of the GPU are free, and ",
                                                            total_bytes_, " are to be published: give less --gib"));
  }

  absl::Status RunArm(const std::string& kind, const std::string& arm, int round) {
    RETURN_IF_ERROR(WaitForRoom());
    ASSIGN_OR_RETURN(const double copy_seconds, CopyPlainly());
    RETURN_IF_ERROR(WaitForRoom());
    if (round >= 0) samples_["plain_copy." + kind + "." + arm].push_back(copy_seconds);
    std::map<std::string, double> seconds;
    RETURN_IF_ERROR(Publish(kind, arm, &seconds));
    if (round < 0) return absl::OkStatus();
    for (const auto& [step, value] : seconds) samples_[absl::StrCat(kind, ".", arm, ".", step)].push_back(value);
    if (arm == "copied") samples_[kind + ".ratio"].push_back(copy_seconds / seconds.at("copy"));
    return absl::OkStatus();
  }

  // As fast as the GPU does it, into memory of its own that is as new as a slab is.
  absl::StatusOr<double> CopyPlainly() const {
    ASSIGN_OR_RETURN(const CudaIpcMemory target, CudaIpcMemory::Allocate(context_, total_bytes_));
    const double start = NowSeconds();
    for (int64_t offset = 0; offset < total_bytes_; offset += kGiB) {
      const auto at = static_cast<CudaDevicePtr>(offset);
      const auto size = static_cast<size_t>(std::min(kGiB, total_bytes_ - offset));
      RETURN_IF_ERROR(Check(cuda_.MemcpyDtoDAsync(target.address() + at, source_->address() + at, size, stream_),
                            "cuMemcpyDtoDAsync"));
    }
    RETURN_IF_ERROR(Check(cuda_.StreamSynchronize(stream_), "cuStreamSynchronize"));
    return NowSeconds() - start;
  }

  absl::Status Publish(const std::string& kind, const std::string& arm, std::map<std::string, double>* seconds) {
    ClientOptions client_options;
    client_options.mode = Mode::kClient;
    client_options.torch_version = "any";
    client_options.socket_path = socket_;
    const auto client = Client::Create(client_options);
    if (!client.ok()) return FromPublic(client.status());
    WeightSpec spec;
    spec.model = flags_.folder;
    spec.quantization = "none";
    spec.layout = "engine";
    spec.engine = "publish_bench";
    spec.engine_version = arm;
    PublishOptions options;
    options.attach.cuda_device = 0;
    options.attach.handle_kinds = {kind == "ipc" ? HandleKind::kCudaIpc : HandleKind::kCudaVmmFd};
    options.attach.deadline = kPatience;
    options.expected_bytes = total_bytes_;
    PublishTimes times;
    options.on_published = [&](const PublishTimes& published) { times = published; };
    double work_seconds = 0;
    const double start = NowSeconds();
    const auto weights = client->AttachOrPublish(
        spec,
        [&](Publisher& publisher) {
          const double begun = NowSeconds();
          const Status status = arm == "copied" ? CopyInto(publisher) : MakeIn(publisher);
          work_seconds = NowSeconds() - begun;
          return status;
        },
        options);
    const double total_seconds = NowSeconds() - start;
    if (!weights.ok()) return FromPublic(weights.status());
    if (const Status verified = weights->Verify(); !verified.ok()) return FromPublic(verified);
    copied_bytes_[arm] = times.copied_bytes;
    *seconds = {{"allocate", times.grant_seconds},
                {arm == "copied" ? "copy" : "fill_in_place", work_seconds},
                {"digest", times.digest_seconds},
                {"commit_without_digest", times.commit_seconds - times.digest_seconds},
                {"total_with_attach", total_seconds}};
    return Unregister(weights->fingerprint());
  }

  Status CopyInto(Publisher& publisher) const {
    for (const SourceTensor& tensor : tensors_) {
      const Status status = publisher.Add(tensor.tensor, reinterpret_cast<const void*>(AddressOf(tensor)));
      if (!status.ok()) return status;
    }
    return publisher.Synchronize();
  }

  // The engine's own kernels write where the service has the memory: here, the fastest that there is.
  Status MakeIn(Publisher& publisher) const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      auto room = publisher.Allocate(tensors_[i].tensor);
      if (!room.ok()) return room.status();
      if (!Fill(reinterpret_cast<CudaDevicePtr>(*room), tensors_[i].size_bytes, i).ok()) {
        return Status(StatusCode::kInternal, "CUDA_ERROR", "cuMemsetD8Async failed");
      }
    }
    return publisher.Synchronize();
  }

  absl::Status Unregister(const std::string& fingerprint) const {
    return connection_->CallOnce(client::DeadlineIn(kPatience), [&](grpc::ClientContext& context) {
      v1::UnregisterRequest request;
      request.set_fingerprint(fingerprint);
      request.set_force(true);
      v1::UnregisterResponse response;
      return connection_->admin_service().Unregister(&context, request, &response);
    });
  }

  nlohmann::ordered_json Report() const {
    nlohmann::ordered_json report = {{"bytes", total_bytes_},
                                     {"tensors", tensors_.size()},
                                     {"rounds", flags_.rounds},
                                     {"copied_bytes", copied_bytes_}};
    const auto rate = [this](double seconds) { return static_cast<double>(total_bytes_) / seconds / 1e9; };
    for (const auto& [name, values] : samples_) {
      report[name.ends_with(".ratio") ? "ratios_to_plain_copy" : "seconds"][name] = ToJson(Summarize(values));
      const bool is_copy = name.rfind("plain_copy.", 0) == 0 || name.ends_with(".copy");
      if (is_copy) report["gb_per_second"][name] = rate(Summarize(values).median);
    }
    return report;
  }

  const Flags& flags_;
  const CudaContext context_;
  CudaDriver& cuda_;
  const std::string gpu_uuid_;
  const std::string socket_;
  const std::vector<SourceTensor> tensors_;
  const int64_t total_bytes_;
  std::optional<ChildProcess> service_;
  std::shared_ptr<client::Connection> connection_;
  std::optional<CudaIpcMemory> source_;
  CudaStream stream_ = nullptr;  // goes with the process
  std::map<std::string, std::vector<double>> samples_;
  std::map<std::string, int64_t> copied_bytes_;  // by arm
};

absl::StatusOr<nlohmann::ordered_json> Run(const Flags& flags) {
  ASSIGN_OR_RETURN(const std::unique_ptr<GpuInventory> inventory, OpenNvml());
  ASSIGN_OR_RETURN(const std::vector<GpuInfo> gpus, inventory->List());
  if (gpus.empty()) return MakeError(Reason::kGpuUnavailable, "this machine has no GPU");
  const GpuInfo& gpu = gpus.front();
  setenv("CUDA_VISIBLE_DEVICES", gpu.uuid.c_str(), 1);
  ASSIGN_OR_RETURN(CudaDriver* const cuda, LoadCudaDriver());
  ASSIGN_OR_RETURN(CudaContext context, CudaContext::Retain(*cuda, 0));
  nlohmann::ordered_json report = {{"benchmark", "gpu_publish"},
                                   {"gpu", gpu.name},
                                   {"driver", inventory->driver_version()},
                                   {"machine", DescribeMachine()}};
  ASSIGN_OR_RETURN(const nlohmann::ordered_json measured, Bench(flags, std::move(context), gpu.uuid).Run());
  report.update(measured);
  return report;
}

// On stderr, where it does not get into the JSON.
void PrintTable(const nlohmann::ordered_json& report) {
  fprintf(stderr, "%.1f GiB in %lld tensors; copied: %s bytes\n", report["bytes"].get<double>() / kGiB,
          report["tensors"].get<long long>(), report["copied_bytes"].dump().c_str());
  for (const auto& [name, summary] : report["seconds"].items()) {
    fprintf(stderr, "%-40s %10.3f ms\n", name.c_str(), summary["median"].get<double>() * 1e3);
  }
  for (const auto& [name, rate] : report["gb_per_second"].items()) {
    fprintf(stderr, "%-40s %10.0f GB/s\n", name.c_str(), rate.get<double>());
  }
  for (const auto& [name, summary] : report["ratios_to_plain_copy"].items()) {
    fprintf(stderr, "%-40s %10.3f (least %.3f)\n", name.c_str(), summary["median"].get<double>(),
            summary["least"].get<double>());
  }
}

}  // namespace
}  // namespace weightbroker::bench

int main(int argc, char** argv) {
  weightbroker::bench::Flags flags;
  CLI::App app("Measures publishing weights that are on the GPU already.");
  app.add_option("--folder", flags.folder, "Where a small model is, or is to be written");
  app.add_option("--bin_dir", flags.bin_dir, "Where weightbrokerd is");
  app.add_option("--gib", flags.gib, "How much is published");
  app.add_option("--tensors", flags.tensors, "In how many tensors");
  app.add_option("--rounds", flags.rounds, "How often each arm has its turn");
  app.add_option("--kinds", flags.kinds, "Of vmm, ipc")->delimiter(',')->check(CLI::IsMember({"vmm", "ipc"}));
  app.add_flag("--json", flags.json, "Also print JSON with every sample, on stdout");
  CLI11_PARSE(app, argc, argv);
  const auto report = weightbroker::bench::Run(flags);
  if (!report.ok()) {
    std::cerr << report.status().message() << "\n";
    return 1;
  }
  weightbroker::bench::PrintTable(*report);
  if (flags.json) std::cout << report->dump(2) << "\n";
  return 0;
}
