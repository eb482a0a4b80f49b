// An inference engine's start-up with the client library: attach, then use the tensors where they lie.
//
//   engine --model /models/llama --torch_version any --register

#include <CLI/CLI.hpp>
#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "client/examples/example_support.h"
#include "client/examples/gpu_memory.h"
#include "client/examples/model_roots.h"
#include "weightbroker/client.h"

namespace {

struct EngineFlags : example::Flags {
  weightbroker::DaemonOptions daemon;
  weightbroker::Mode mode = weightbroker::Mode::kClient;
  weightbroker::Fallback fallback = weightbroker::Fallback::kDisk;
  std::map<std::string, std::string> model_roots;
  bool verify = false;
  bool prefault = false;
  double deadline_seconds = 10;
  int cuda_device = -1;
  std::vector<weightbroker::HandleKind> handle_kinds;
  std::vector<std::string> devices;
  bool evict_unleased = false;
  std::string alias;
};

int PrintFailure(const weightbroker::Status& status, const EngineFlags& flags) {
  // Where the disk was the second choice, what counts is whether the service could have been asked.
  const auto service = status.metadata().find("service_reason");
  const std::string reason = service == status.metadata().end() ? status.reason() : service->second;
  const bool unavailable = status.code() == weightbroker::StatusCode::kUnavailable ||
                           status.code() == weightbroker::StatusCode::kDeadlineExceeded ||
                           reason == "SERVICE_UNAVAILABLE" || reason == "SERVICE_NOT_STARTED";
  return example::PrintFailure(status.reason(), status.message(), status.metadata(), unavailable, flags.json);
}

void PrintLeaseEvent(const weightbroker::LeaseEvent& event) {
  using Kind = weightbroker::LeaseEvent::Kind;
  static const std::map<Kind, const char*> kNames = {{Kind::kDraining, "is about to end"},
                                                     {Kind::kInterrupted, "was interrupted"},
                                                     {Kind::kRenewed, "was renewed"},
                                                     {Kind::kLost, "was lost"},
                                                     {Kind::kQuarantined, "is on bytes that were found damaged"},
                                                     {Kind::kSuperseded, "is on a version that is not the latest"}};
  const std::string why =
      event.kind == Kind::kSuperseded ? event.alias + " names " + event.fingerprint + " now" : event.why.ToString();
  fprintf(stderr, "the lease %s: %s\n", kNames.at(event.kind), why.c_str());
}

weightbroker::AttachOptions ToAttachOptions(const EngineFlags& flags) {
  weightbroker::AttachOptions options;
  options.rank = flags.rank;
  options.fallback = flags.fallback;
  options.register_if_missing = flags.register_if_missing;
  options.prefault = flags.prefault ? weightbroker::Prefault::kPopulate : weightbroker::Prefault::kNone;
  options.deadline = std::chrono::milliseconds(static_cast<int64_t>(flags.deadline_seconds * 1000));
  options.cuda_device = flags.cuda_device;
  options.handle_kinds = flags.handle_kinds;
  options.devices = flags.devices;
  options.evict_unleased = flags.evict_unleased;
  options.alias = flags.alias;
  options.on_lease_event = PrintLeaseEvent;
  options.on_progress = [](const weightbroker::LoadProgress& progress) {
    fprintf(stderr, "%s: %lld of %lld bytes\n", progress.phase.c_str(), static_cast<long long>(progress.done_bytes),
            static_cast<long long>(progress.total_bytes));
  };
  return options;
}

std::vector<example::View> ToViews(const weightbroker::MappedWeights& weights) {
  std::vector<example::View> views;
  for (const weightbroker::Tensor& tensor : weights) {
    views.push_back({tensor.name,
                     {reinterpret_cast<const char*>(tensor.data), static_cast<size_t>(tensor.size_bytes)},
                     !tensor.alias_of.empty()});
  }
  return views;
}

int ReadWeights(const EngineFlags& flags, const std::vector<example::View>& views, example::Report* report) {
  example::ReadAll(views, report);
  if (!flags.dump_dir.empty() && !example::DumpAll(views, flags.dump_dir)) return 1;
  example::Print(*report, flags.json);
  return flags.hold_seconds > 0 ? example::Hold(flags, views, *report) : 0;
}

// What lies on a GPU is brought to the host to be read here; the weights stay mapped meanwhile.
int ReadWeightsOfGpu(const EngineFlags& flags, const std::vector<example::View>& views, example::Report* report) {
  std::string error;
  const example::HostCopy copy(flags.cuda_device, views, &error);
  if (error.empty()) return ReadWeights(flags, copy.views(), report);
  fprintf(stderr, "%s\n", error.c_str());
  return 1;
}

int RunOnce(const weightbroker::Client& client, const EngineFlags& flags) {
  weightbroker::WeightSpec spec;
  spec.model = flags.model;
  spec.tensor_parallel_size = flags.tensor_parallel_size;
  spec.layout = flags.layout;
  spec.quantization = flags.quantization;
  const double start = example::Now();
  const auto weights = client.Attach(spec, ToAttachOptions(flags));
  const double attach_seconds = example::Now() - start;
  if (!weights.ok()) return PrintFailure(weights.status(), flags);

  const std::vector<example::View> views = ToViews(*weights);
  const bool on_gpu = weights->device().kind == weightbroker::DeviceKind::kCuda;
  if (flags.write_fault && on_gpu) {
    fprintf(stderr, "--write_fault is for host memory\n");
    return 2;
  }
  if (flags.write_fault) return example::WriteToWeights(views);
  if (flags.verify) {
    if (const weightbroker::Status status = weights->Verify(); !status.ok()) return PrintFailure(status, flags);
  }
  example::Report report;
  report.program = "engine";
  const bool attached = weights->source().kind == weightbroker::SourceKind::kAttached;
  report.source = attached ? "attached" : "disk";
  if (!attached) report.why_not_attached = weights->source().why_not_attached.ToString();
  report.fingerprint = weights->fingerprint();
  report.generation = weights->generation();
  report.attach_seconds = attach_seconds;
  report.device = on_gpu ? weights->device().uuid : "host";
  return on_gpu ? ReadWeightsOfGpu(flags, views, &report) : ReadWeights(flags, views, &report);
}

int Run(const EngineFlags& flags) {
  weightbroker::ClientOptions options;
  options.mode = flags.mode;
  options.torch_version = flags.torch_version;
  options.socket_path = flags.socket;
  options.model_roots = flags.model_roots;
  options.daemon = flags.daemon;
  const auto client = weightbroker::Client::Create(options);
  if (!client.ok()) return PrintFailure(client.status(), flags);
  for (int i = 0; i < flags.loop; ++i) {
    if (const int code = RunOnce(*client, flags); code != 0) return code;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  using weightbroker::Fallback;
  using weightbroker::HandleKind;
  using weightbroker::Mode;
  EngineFlags flags;
  CLI::App app("An example engine: maps a model's weights, reads every tensor and prints a checksum.");
  example::AddFlags(app, &flags);
  app.add_option("--mode", flags.mode,
                 "off: load from disk here; client: attach to the service; daemon: the same, and start one if none "
                 "answers")
      ->transform(CLI::Transformer(
          std::map<std::string, Mode>{{"off", Mode::kOff}, {"client", Mode::kClient}, {"daemon", Mode::kDaemon}}));
  app.add_option("--daemon_program", flags.daemon.program,
                 "weightbrokerd, for --mode daemon; default: $WEIGHTBROKERD, or the one beside this program");
  app.add_option("--daemon_flag", flags.daemon.flags,
                 "A flag for it; may be repeated: --daemon_flag=--log_level=debug");
  app.add_option("--daemon_log", flags.daemon.log_path, "Where its log goes; default: the socket's path and .log");
  app.add_option("--fallback", flags.fallback, "What to do where the service cannot give the weights: disk or fail")
      ->transform(
          CLI::Transformer(std::map<std::string, Fallback>{{"disk", Fallback::kDisk}, {"fail", Fallback::kFail}}));
  example::AddModelRootFlag(
      app, "name=/folder, for models name:relative/path that are loaded from disk, and for --mode daemon",
      &flags.model_roots);
  app.add_option("--deadline_seconds", flags.deadline_seconds, "For everything but loading")
      ->check(CLI::PositiveNumber);
  app.add_option("--cuda_device", flags.cuda_device,
                 "The GPU that it computes on, as this process counts; default: none")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--handle_kind", flags.handle_kinds, "A kind of memory to accept, best first; may be repeated")
      ->transform(CLI::Transformer(std::map<std::string, HandleKind>{{"HOST_MEMFD", HandleKind::kHostMemfd},
                                                                     {"CUDA_VMM_FD", HandleKind::kCudaVmmFd},
                                                                     {"CUDA_IPC", HandleKind::kCudaIpc}}));
  app.add_option("--devices", flags.devices, "The UUID of each rank's GPU, in the order of ranks")->delimiter(',');
  app.add_option("--alias", flags.alias, "Attach to what this alias names, as llama@live; the model is for the disk");
  app.add_flag("--evict_unleased", flags.evict_unleased,
               "Where a load from disk needs the room on the GPU, have the service let go of what nobody holds");
  app.add_flag("--verify", flags.verify, "Compare every tensor with its digest");
  app.add_flag("--prefault", flags.prefault, "Map every page while attaching");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return Run(flags);
}
