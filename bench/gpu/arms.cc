#include "bench/gpu/arms.h"

#include <fcntl.h>
#include <unistd.h>

#include <fstream>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/bench_support.h"
#include "bench/gpu/bench_service.h"
#include "bench/gpu/holder.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/unique_fd.h"
#include "common/process/spawn.h"

namespace weightbroker::bench {
namespace {

std::vector<std::string> CheckpointFlags(const GpuBenchSetup& setup) {
  return {"--folder",  setup.folder,
          "--tensors", absl::StrCat(setup.checkpoint.tensor_count),
          "--shards",  absl::StrCat(setup.checkpoint.shard_count),
          "--bytes",   absl::StrCat(setup.checkpoint.total_bytes)};
}

// Runs a program that prints one line of JSON. `arguments` get the moment of asking as the last.
absl::StatusOr<nlohmann::json> RunSample(const std::string& path, std::vector<std::string> arguments,
                                         const std::string& output_path) {
  const UniqueFd output(open(output_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  arguments.insert(arguments.end(), {"--started_at", Digits(NowSeconds())});
  ASSIGN_OR_RETURN(ChildProcess child, Spawn({.path = path, .arguments = arguments, .fds = {{output.get(), 1}}}));
  ASSIGN_OR_RETURN(const ExitStatus exit, child.Wait());
  if (!exit.success()) return MakeError(Reason::kSystemError, absl::StrCat(path, ": ", exit.ToString()));
  std::ifstream file(output_path);
  nlohmann::json times = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (times.is_object()) return times;
  return MakeError(Reason::kProtocolError, absl::StrCat(path, " printed no JSON"));
}

class ServiceArm : public Arm {
 public:
  ServiceArm(const GpuBenchSetup& setup, v1::HandleKind kind, std::string sample_program)
      : setup_(setup),
        kind_(kind),
        sample_program_(std::move(sample_program)),
        socket_(absl::StrCat("/tmp/gpu_attach_bench.", getpid(), ".", kind, ".", sample_program_, ".sock")),
        service_({.bin_dir = setup.bin_dir,
                  .folder = setup.folder,
                  .socket = socket_,
                  .flags = {"--devices", setup.gpu_uuid}}) {}

  absl::Status Start() {
    v1::RegisterRequest request;
    request.add_devices(setup_.gpu_uuid);
    request.add_handle_kinds(kind_);
    return service_.Start(request).status();
  }

  absl::StatusOr<nlohmann::json> Sample() override {
    return RunSample(setup_.bin_dir + "/" + sample_program_,
                     {"--how", "attach", "--kind", kind_ == v1::HANDLE_KIND_CUDA_IPC ? "CUDA_IPC" : "CUDA_VMM_FD",
                      "--socket", socket_, "--model", setup_.folder, "--image", setup_.image, "--tensors",
                      absl::StrCat(setup_.checkpoint.tensor_count)},
                     socket_ + ".out");
  }

 private:
  const GpuBenchSetup setup_;
  const v1::HandleKind kind_;
  const std::string sample_program_;
  const std::string socket_;
  BenchService service_;
};

class TensorsArm : public Arm {
 public:
  explicit TensorsArm(const GpuBenchSetup& setup) : setup_(setup), handles_(setup.folder + ".handles") {}

  absl::Status Start() {
    std::vector<std::string> arguments = CheckpointFlags(setup_);
    arguments.insert(arguments.end(), {"--handles", handles_});
    ASSIGN_OR_RETURN(holder_, Holder::Start(setup_.bin_dir + "/gpu_tensor_exporter", arguments));
    return holder_->Expect("ready");
  }

  absl::StatusOr<nlohmann::json> Sample() override {
    return RunSample(setup_.bin_dir + "/gpu_attach_sample",
                     {"--how", "tensors", "--handles", handles_, "--image", setup_.image, "--tensors",
                      absl::StrCat(setup_.checkpoint.tensor_count)},
                     handles_ + ".out");
  }

 private:
  const GpuBenchSetup setup_;
  const std::string handles_;
  std::unique_ptr<Holder> holder_;
};

class TorchArm : public Arm {
 public:
  explicit TorchArm(const GpuBenchSetup& setup) : setup_(setup), handles_(setup.folder + ".torch_handles") {}

  absl::Status Start() {
    nlohmann::json tensors;
    for (const BenchTensor& tensor : ListBenchTensors(setup_.folder, setup_.checkpoint)) {
      tensors.push_back(
          {{"path", tensor.path}, {"offset_bytes", tensor.offset_bytes}, {"size_bytes", tensor.size_bytes}});
    }
    std::ofstream(handles_ + ".json") << tensors;
    ASSIGN_OR_RETURN(holder_, Holder::Start("/usr/bin/env", {setup_.python, setup_.torch_script, "export",
                                                             "--tensors_json", handles_ + ".json"}));
    return holder_->Expect("ready");
  }

  absl::StatusOr<nlohmann::json> Sample() override {
    RETURN_IF_ERROR(holder_->Send(handles_));
    RETURN_IF_ERROR(holder_->Expect("ok"));
    return RunSample("/usr/bin/env",
                     {setup_.python, setup_.torch_script, "import", "--handles", handles_, "--image", setup_.image},
                     handles_ + ".out");
  }

 private:
  const GpuBenchSetup setup_;
  const std::string handles_;
  std::unique_ptr<Holder> holder_;
};

template <typename Made>
absl::StatusOr<std::unique_ptr<Arm>> Started(std::unique_ptr<Made> arm) {
  RETURN_IF_ERROR(arm->Start());
  return std::unique_ptr<Arm>(std::move(arm));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Arm>> MakeArm(const std::string& name, const GpuBenchSetup& setup) {
  if (name == "vmm") {
    return Started(std::make_unique<ServiceArm>(setup, v1::HANDLE_KIND_CUDA_VMM_FD, "gpu_attach_sample"));
  }
  if (name == "vmm_torch") {
    return Started(std::make_unique<ServiceArm>(setup, v1::HANDLE_KIND_CUDA_VMM_FD, "gpu_attach_sample_torch"));
  }
  if (name == "ipc") return Started(std::make_unique<ServiceArm>(setup, v1::HANDLE_KIND_CUDA_IPC, "gpu_attach_sample"));
  if (name == "tensors") return Started(std::make_unique<TensorsArm>(setup));
  if (name == "torch") return Started(std::make_unique<TorchArm>(setup));
  return MakeError(Reason::kInvalidArgument, absl::StrCat("there is no arm \"", name, "\""));
}

}  // namespace weightbroker::bench
