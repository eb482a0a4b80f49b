// An inference engine's start-up with the client library: attach, then use the tensors where they lie.
//
//   engine --model /models/llama --torch_version any --register

#include <CLI/CLI.hpp>
#include <map>
#include <string>
#include <vector>

#include "client/examples/example_support.h"
#include "weightbroker/client.h"

namespace {

struct EngineFlags : example::Flags {
  weightbroker::Mode mode = weightbroker::Mode::kClient;
  weightbroker::Fallback fallback = weightbroker::Fallback::kDisk;
  std::map<std::string, std::string> model_roots;
  bool verify = false;
  bool prefault = false;
};

int PrintFailure(const weightbroker::Status& status, const EngineFlags& flags) {
  const bool unavailable = status.code() == weightbroker::StatusCode::kUnavailable ||
                           status.code() == weightbroker::StatusCode::kDeadlineExceeded;
  return example::PrintFailure(status.reason(), status.message(), status.metadata(), unavailable, flags.json);
}

weightbroker::AttachOptions ToAttachOptions(const EngineFlags& flags) {
  weightbroker::AttachOptions options;
  options.rank = flags.rank;
  options.fallback = flags.fallback;
  options.register_if_missing = flags.register_if_missing;
  options.prefault = flags.prefault ? weightbroker::Prefault::kPopulate : weightbroker::Prefault::kNone;
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

int RunOnce(const weightbroker::Client& client, const EngineFlags& flags) {
  weightbroker::WeightSpec spec;
  spec.model = flags.model;
  spec.tensor_parallel_size = flags.tensor_parallel_size;
  const double start = example::Now();
  const auto weights = client.Attach(spec, ToAttachOptions(flags));
  const double attach_seconds = example::Now() - start;
  if (!weights.ok()) return PrintFailure(weights.status(), flags);

  const std::vector<example::View> views = ToViews(*weights);
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
  example::ReadAll(views, &report);
  if (!flags.dump_dir.empty() && !example::DumpAll(views, flags.dump_dir)) return 1;
  example::Print(report, flags.json);
  if (flags.hold_seconds > 0) example::Hold(flags.hold_seconds);
  if (weights->lease_lost()) fprintf(stderr, "the lease was lost: %s\n", weights->lease_status().ToString().c_str());
  return 0;
}

int Run(const EngineFlags& flags) {
  weightbroker::ClientOptions options;
  options.mode = flags.mode;
  options.torch_version = flags.torch_version;
  options.socket_path = flags.socket;
  options.model_roots = flags.model_roots;
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
  using weightbroker::Mode;
  EngineFlags flags;
  std::vector<std::string> roots;
  CLI::App app("An example engine: maps a model's weights, reads every tensor and prints a checksum.");
  example::AddFlags(app, &flags);
  app.add_option("--mode", flags.mode, "off: load from disk here; client: attach to the service")
      ->transform(CLI::Transformer(std::map<std::string, Mode>{{"off", Mode::kOff}, {"client", Mode::kClient}}));
  app.add_option("--fallback", flags.fallback, "What to do where the service cannot give the weights: disk or fail")
      ->transform(
          CLI::Transformer(std::map<std::string, Fallback>{{"disk", Fallback::kDisk}, {"fail", Fallback::kFail}}));
  app.add_option("--model_root", roots, "name=/folder, for models name:relative/path that are loaded from disk");
  app.add_flag("--verify", flags.verify, "Compare every tensor with its digest");
  app.add_flag("--prefault", flags.prefault, "Map every page while attaching");
  try {
    app.parse(argc, argv);
    for (const std::string& root : roots) {
      const size_t equals = root.find('=');
      if (equals == std::string::npos) throw CLI::ValidationError("--model_root", "needs name=/folder");
      flags.model_roots[root.substr(0, equals)] = root.substr(equals + 1);
    }
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return Run(flags);
}
