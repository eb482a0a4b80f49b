// An engine on libtorch: builds all-MiniLM-L6-v2 without storage, binds it to weights that the service holds, and
// embeds sentences, on the host or on a GPU.
//
//   torch_engine --model models:all-MiniLM-L6-v2 --inputs tests/data/minilm/sentences.json --register
//   torch_engine --model models:all-MiniLM-L6-v2 --inputs ... --device cuda:0 --compare_private
//
// Exit codes: 0 done, 1 the embeddings are wrong, 2 usage, 3 refused, 4 unavailable.

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/version.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "client/examples/model_roots.h"
#include "client/examples/torch_engine/bert_model.h"
#include "client/examples/torch_engine/sentences.h"
#include "weightbroker/client.h"
#include "weightbroker/torch.h"

namespace example {
namespace {

struct Flags {
  std::string socket;
  std::string model;
  std::string torch_version = TORCH_VERSION;
  weightbroker::Mode mode = weightbroker::Mode::kClient;
  weightbroker::Fallback fallback = weightbroker::Fallback::kFail;
  std::map<std::string, std::string> model_roots;
  std::string device = "cpu";
  std::string inputs;
  std::string handle_kind;
  bool register_if_missing = false;
  bool compare_private = false;
  double least_cosine = 0.9999;
};

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

int PrintFailure(const weightbroker::Status& status) {
  fprintf(stderr, "%s\n", status.ToString().c_str());
  printf("%s\n",
         nlohmann::json({{"ok", false}, {"reason", status.reason()}, {"message", status.message()}}).dump().c_str());
  return status.code() == weightbroker::StatusCode::kUnavailable ? 4 : 3;
}

// A model that computes on weights of the service or of the disk.
struct Engine {
  std::string source;
  std::shared_ptr<BertModel> model;
  double attach_seconds = 0;
  double bind_seconds = 0;
};

weightbroker::Result<weightbroker::MappedWeights> GetWeights(const Flags& flags, weightbroker::Mode mode) {
  weightbroker::ClientOptions options;
  options.mode = mode;
  options.torch_version = flags.torch_version;
  options.socket_path = flags.socket;
  options.model_roots = flags.model_roots;
  const auto client = weightbroker::Client::Create(options);
  if (!client.ok()) return client.status();
  weightbroker::WeightSpec spec;
  spec.model = flags.model;
  weightbroker::AttachOptions attach;
  attach.fallback = flags.fallback;
  attach.register_if_missing = flags.register_if_missing;
  const at::Device device(flags.device);
  if (device.is_cuda()) attach.cuda_device = device.has_index() ? device.index() : 0;
  if (flags.handle_kind == "CUDA_IPC") attach.handle_kinds = {weightbroker::HandleKind::kCudaIpc};
  if (flags.handle_kind == "CUDA_VMM_FD") attach.handle_kinds = {weightbroker::HandleKind::kCudaVmmFd};
  return client->Attach(spec, attach);
}

weightbroker::Result<Engine> StartEngine(const Flags& flags, weightbroker::Mode mode) {
  Engine engine;
  const double start = Now();
  const auto weights = GetWeights(flags, mode);
  if (!weights.ok()) return weights.status();
  const double attached = Now();

  BertConfig config;
  config.has_position_ids = weights->Find("embeddings.position_ids") != nullptr;
  engine.model = std::make_shared<BertModel>(config, at::TensorOptions(at::kMeta).dtype(at::kFloat));
  engine.model->eval();
  if (auto status = weightbroker::BindModule(*engine.model, *weights); !status.ok()) return status;
  engine.attach_seconds = attached - start;
  engine.bind_seconds = Now() - attached;
  engine.source = weights->source().kind == weightbroker::SourceKind::kAttached ? "attached" : "disk";
  return engine;
}

template <typename Value>
at::Tensor ToMatrix(const std::vector<std::vector<Value>>& rows, at::ScalarType type) {
  at::Tensor matrix = at::empty({static_cast<int64_t>(rows.size()), static_cast<int64_t>(rows.front().size())}, type);
  for (size_t i = 0; i < rows.size(); ++i) {
    matrix[static_cast<int64_t>(i)].copy_(at::from_blob(const_cast<Value*>(rows[i].data()), {matrix.size(1)}, type));
  }
  return matrix;
}

at::Tensor Embed(const Engine& engine, const Sentences& sentences, const at::Device& device) {
  const c10::InferenceMode inference;
  const at::Tensor input_ids = ToMatrix(sentences.input_ids, at::kLong).to(device);
  const at::Tensor attention_mask = ToMatrix(sentences.attention_mask, at::kLong).to(device);
  return engine.model->Embed(input_ids, attention_mask).to(at::kCPU);
}

// The least cosine between a sentence's embedding and the one that it is known to have.
double LeastCosine(const at::Tensor& embeddings, const Sentences& sentences) {
  const at::Tensor known = ToMatrix(sentences.embeddings, at::kFloat);
  return at::cosine_similarity(embeddings, known, 1).min().item<double>();
}

int Run(const Flags& flags, const Sentences& sentences) {
  // Matrices are multiplied as the reference was, in full precision.
  at::globalContext().setAllowTF32CuBLAS(false);
  const at::Device device(flags.device);
  const auto engine = StartEngine(flags, flags.mode);
  if (!engine.ok()) return PrintFailure(engine.status());
  const double start = Now();
  const at::Tensor embeddings = Embed(*engine, sentences, device);
  nlohmann::ordered_json report = {{"ok", true},
                                   {"program", "torch_engine"},
                                   {"torch_version", TORCH_VERSION},
                                   {"device", device.str()},
                                   {"source", engine->source},
                                   {"attach_seconds", engine->attach_seconds},
                                   {"bind_seconds", engine->bind_seconds},
                                   {"first_forward_seconds", Now() - start},
                                   {"sentences", embeddings.size(0)}};
  bool right = true;
  if (!sentences.embeddings.empty()) {
    const double cosine = LeastCosine(embeddings, sentences);
    right = cosine >= flags.least_cosine;
    report["least_cosine"] = cosine;
  }
  if (flags.compare_private) {
    const auto other = StartEngine(flags, weightbroker::Mode::kOff);
    if (!other.ok()) return PrintFailure(other.status());
    const bool equal = at::equal(embeddings, Embed(*other, sentences, device));
    right = right && equal;
    report["equals_private"] = equal;
  }
  report["ok"] = right;
  printf("%s\n", report.dump().c_str());
  return right ? 0 : 1;
}

}  // namespace
}  // namespace example

int main(int argc, char** argv) {
  using weightbroker::Fallback;
  using weightbroker::Mode;
  example::Flags flags;
  CLI::App app("An example engine on libtorch: embeds sentences with all-MiniLM-L6-v2 on mapped weights.");
  app.add_option("--socket", flags.socket, "The service's socket")->envname("WEIGHTBROKER_SOCKET");
  app.add_option("--model", flags.model, "The model: an absolute folder, or name:relative/path")->required();
  app.add_option("--torch_version", flags.torch_version, "What to register and ask for; this program's own by default");
  app.add_option("--mode", flags.mode, "off: load from disk here; client: attach to the service")
      ->transform(CLI::Transformer(std::map<std::string, Mode>{{"off", Mode::kOff}, {"client", Mode::kClient}}));
  app.add_option("--fallback", flags.fallback, "What to do where the service cannot give the weights: disk or fail")
      ->transform(
          CLI::Transformer(std::map<std::string, Fallback>{{"disk", Fallback::kDisk}, {"fail", Fallback::kFail}}));
  example::AddModelRootFlag(app, "name=/folder, for models name:relative/path that are loaded from disk",
                            &flags.model_roots);
  app.add_option("--device", flags.device, "Where to compute: cpu, cuda or cuda:N");
  app.add_option("--handle_kind", flags.handle_kind, "The only kind of GPU memory to accept")
      ->check(CLI::IsMember({"CUDA_VMM_FD", "CUDA_IPC"}));
  app.add_option("--inputs", flags.inputs, "JSON with input_ids, attention_mask and the embeddings to compare with")
      ->required();
  app.add_flag("--register", flags.register_if_missing, "Have the service load the model if it has not");
  app.add_flag("--compare_private", flags.compare_private,
               "Load the weights from disk as well, and expect the same embeddings to the last bit");
  app.add_option("--least_cosine", flags.least_cosine, "With the embeddings of the inputs' file");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  const auto sentences = example::ReadSentences(flags.inputs);
  if (!sentences.has_value()) return 2;
  try {
    return example::Run(flags, *sentences);
  } catch (const std::exception& error) {  // of torch
    fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
