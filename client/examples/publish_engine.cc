// An inference engine that makes its own weights of a checkpoint's: it fuses query, key and value projections, and
// computes a table. The first start does it and publishes the result; every later one maps it.
//
//   publish_engine --model /models/llama --torch_version any [--cuda_device 0]

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "client/examples/example_support.h"
#include "client/examples/gpu_memory.h"
#include "weightbroker/client.h"

namespace {

using weightbroker::Publisher;
using weightbroker::Status;
using weightbroker::Tensor;
using weightbroker::TensorToPublish;

struct EngineFlags : example::Flags {
  std::string model_folder;
  std::string version = "1";
  bool verify = false;
  int cuda_device = -1;
  std::vector<weightbroker::HandleKind> handle_kinds;
};

int PrintFailure(const Status& status, const EngineFlags& flags) {
  const bool unavailable = status.code() == weightbroker::StatusCode::kUnavailable ||
                           status.code() == weightbroker::StatusCode::kDeadlineExceeded;
  return example::PrintFailure(status.reason(), status.message(), status.metadata(), unavailable, flags.json);
}

TensorToPublish Describe(const Tensor& tensor, const std::string& name) {
  TensorToPublish described;
  described.name = name;
  described.dtype = tensor.dtype;
  described.shape.assign(tensor.shape.begin(), tensor.shape.end());
  described.alias_of = std::string(tensor.alias_of);
  return described;
}

// What the engine does to a checkpoint's weights before it can use them.
class PostProcessor {
 public:
  PostProcessor(const weightbroker::MappedWeights& checkpoint, Publisher& publisher)
      : checkpoint_(checkpoint), publisher_(publisher) {}

  Status Run() {
    for (const Tensor& tensor : checkpoint_) {
      if (Status status = PutTensor(tensor); !status.ok()) return status;
    }
    for (const Tensor& tensor : checkpoint_) {
      if (tensor.alias_of.empty()) continue;
      if (Status status = publisher_.AddAlias(Describe(tensor, std::string(tensor.name))); !status.ok()) return status;
    }
    return PutRotaryTable();
  }

 private:
  Status PutTensor(const Tensor& tensor) {
    const std::string name(tensor.name);
    if (!tensor.alias_of.empty()) return Status();  // once everything else is there
    const size_t at = name.find(kQuery);
    if (at != std::string::npos && PartsOf(name, at).size() == 3) return PutFused(name, at);
    if (IsFusedElsewhere(name)) return Status();
    TensorToPublish described = Describe(tensor, name);
    return publisher_.Add(described, tensor.data);
  }

  // [Q|K|V], one under the other, written straight into the service's memory.
  Status PutFused(const std::string& query_name, size_t at) {
    const std::vector<const Tensor*> parts = PartsOf(query_name, at);
    std::string fused_name = query_name;
    fused_name.replace(at, strlen(kQuery), "qkv_proj");
    TensorToPublish fused = Describe(*parts[0], fused_name);
    for (size_t i = 1; i < parts.size(); ++i) fused.shape[0] += parts[i]->shape[0];
    fused.metadata["fused_from"] = "q_proj,k_proj,v_proj";
    auto room = publisher_.Allocate(fused);
    if (!room.ok()) return room.status();
    std::byte* to = *room;
    for (const Tensor* part : parts) {
      if (Status status = Write(to, *part); !status.ok()) return status;
      to += part->size_bytes;
    }
    return Status();
  }

  // To where the publisher's memory is. An engine that computes on the GPU has its kernels write there.
  Status Write(std::byte* to, const Tensor& from) {
    const auto size = static_cast<size_t>(from.size_bytes);
    const weightbroker::Device device = publisher_.device();
    if (device.kind == weightbroker::DeviceKind::kHost) {
      memcpy(to, from.data, size);
      return Status();
    }
    const std::string error = example::CopyToGpu(device.ordinal, to, from.data, size);
    return error.empty() ? Status() : Status(weightbroker::StatusCode::kInternal, "CUDA_ERROR", error);
  }

  // A buffer that no checkpoint has.
  Status PutRotaryTable() {
    constexpr int kPairs = 32;
    float table[kPairs];
    for (int i = 0; i < kPairs; ++i) table[i] = std::pow(10000.0f, -static_cast<float>(i) / kPairs);
    TensorToPublish buffer;
    buffer.name = "rotary.inv_freq";
    buffer.dtype = weightbroker::DataType::kF32;
    buffer.shape = {kPairs};
    buffer.kind = weightbroker::TensorKind::kNonPersistentBuffer;
    return publisher_.Add(buffer, table);
  }

  // Query, key and value of the layer, if they are there and have the same columns.
  std::vector<const Tensor*> PartsOf(const std::string& query_name, size_t at) const {
    std::vector<const Tensor*> parts;
    for (const char* part : {kQuery, kKey, kValue}) {
      std::string name = query_name;
      name.replace(at, strlen(kQuery), part);
      const Tensor* const tensor = checkpoint_.Find(name);
      if (tensor == nullptr || tensor->shape.size() != 2 || !tensor->alias_of.empty()) break;
      if (!parts.empty() && (tensor->dtype != parts[0]->dtype || tensor->shape[1] != parts[0]->shape[1])) break;
      parts.push_back(tensor);
    }
    return parts;
  }

  bool IsFusedElsewhere(const std::string& name) const {
    for (const char* part : {kKey, kValue}) {
      const size_t at = name.find(part);
      if (at == std::string::npos) continue;
      std::string query_name = name;
      query_name.replace(at, strlen(part), kQuery);
      return PartsOf(query_name, at).size() == 3;
    }
    return false;
  }

  static constexpr const char* kQuery = "q_proj";
  static constexpr const char* kKey = "k_proj";
  static constexpr const char* kValue = "v_proj";

  const weightbroker::MappedWeights& checkpoint_;
  Publisher& publisher_;
};

// The engine's own way to its weights, of which the service knows nothing.
Status LoadAndPublish(const EngineFlags& flags, Publisher& publisher) {
  weightbroker::ClientOptions options;
  options.torch_version = flags.torch_version;
  const auto reader = weightbroker::Client::Create(options);
  if (!reader.ok()) return reader.status();
  weightbroker::WeightSpec spec;
  spec.model = flags.model_folder.empty() ? flags.model : flags.model_folder;
  const auto checkpoint = reader->Attach(spec);
  if (!checkpoint.ok()) return checkpoint.status();
  return PostProcessor(*checkpoint, publisher).Run();
}

int ReadWeights(const EngineFlags& flags, const std::vector<example::View>& views, example::Report* report) {
  example::ReadAll(views, report);
  example::Print(*report, flags.json);
  return flags.hold_seconds > 0 ? example::Hold(flags, views, *report) : 0;
}

int Run(const EngineFlags& flags) {
  weightbroker::ClientOptions options;
  options.mode = weightbroker::Mode::kClient;
  options.torch_version = flags.torch_version;
  options.socket_path = flags.socket;
  const auto client = weightbroker::Client::Create(options);
  if (!client.ok()) return PrintFailure(client.status(), flags);

  weightbroker::WeightSpec spec;
  spec.model = flags.model;
  spec.layout = "engine";
  spec.engine = "publish_engine";
  spec.engine_version = flags.version;
  weightbroker::PublishOptions publish;
  publish.attach.cuda_device = flags.cuda_device;
  publish.attach.handle_kinds = flags.handle_kinds;
  bool published = false;
  const double start = example::Now();
  const auto weights = client->AttachOrPublish(
      spec,
      [&](Publisher& publisher) {
        published = true;
        return LoadAndPublish(flags, publisher);
      },
      publish);
  if (!weights.ok()) return PrintFailure(weights.status(), flags);
  if (flags.verify) {
    if (const Status status = weights->Verify(); !status.ok()) return PrintFailure(status, flags);
  }

  std::vector<example::View> views;
  for (const Tensor& tensor : *weights) {
    views.push_back({tensor.name,
                     {reinterpret_cast<const char*>(tensor.data), static_cast<size_t>(tensor.size_bytes)},
                     !tensor.alias_of.empty()});
  }
  example::Report report;
  report.program = "publish_engine";
  report.source = published ? "published" : "attached";
  report.fingerprint = weights->fingerprint();
  report.generation = weights->generation();
  report.attach_seconds = example::Now() - start;
  if (weights->device().kind == weightbroker::DeviceKind::kHost) return ReadWeights(flags, views, &report);
  report.device = weights->device().uuid;
  std::string error;
  const example::HostCopy copy(weights->device().ordinal, views, &error);
  if (error.empty()) return ReadWeights(flags, copy.views(), &report);
  fprintf(stderr, "%s\n", error.c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  EngineFlags flags;
  CLI::App app("An example engine: publishes the weights that it has made of a model's, or maps them.");
  example::AddFlags(app, &flags);
  app.add_option("--model_folder", flags.model_folder,
                 "Where the model lies for this process; default: --model, as an absolute folder");
  app.add_option("--engine_version", flags.version, "Under which version it publishes");
  app.add_option("--cuda_device", flags.cuda_device, "Publishes to this GPU, as this process counts");
  const std::map<std::string, weightbroker::HandleKind> kinds = {{"HOST_MEMFD", weightbroker::HandleKind::kHostMemfd},
                                                                 {"CUDA_VMM_FD", weightbroker::HandleKind::kCudaVmmFd},
                                                                 {"CUDA_IPC", weightbroker::HandleKind::kCudaIpc}};
  app.add_option("--handle_kind", flags.handle_kinds, "Handle kinds that it can map, best first")
      ->transform(CLI::CheckedTransformer(kinds))
      ->delimiter(',');
  app.add_flag("--verify", flags.verify, "Compares every digest");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return Run(flags);
}
