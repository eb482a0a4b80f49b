// Loads all ranks of a model the way a loader does, and lets another process look at them.
//
//   reference_loader FOLDER [ARCHITECTURE_DIR]
//
// Reads requests, one JSON object a line, with the fields of a WeightSpec by their names in the .proto file, and
// "only_plan": true for one that is not to be loaded. Answers each with one line of JSON: {"ranks": [{"rank", "fd",
// "slab_bytes", "tensors": [{"name", "dtype", "shape", "offset_bytes", "size_bytes", "alias_of", "digest"}]}],
// "read_bytes", "file_bytes"}, or {"reason", "message", "metadata"}. `fd` is this process's; what it holds stays until
// the next request.
#include <google/protobuf/util/json_util.h>

#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/checkpoint.h"
#include "common/identity/checkpoint_identity.h"
#include "common/load/host_destination.h"
#include "common/load/load_engine.h"
#include "common/memory/host_slab.h"
#include "common/plan/architecture.h"
#include "common/plan/plan.h"
#include "common/quant/gate.h"

namespace weightbroker {
namespace {

using Json = nlohmann::json;

class ReferenceLoader {
 public:
  ReferenceLoader(std::string folder, ArchitectureSet architectures)
      : folder_(std::move(folder)), architectures_(std::move(architectures)) {}

  absl::StatusOr<Json> Answer(Json request) {
    slabs_.clear();
    const bool only_plan = request.value("only_plan", false);
    request.erase("only_plan");
    v1::WeightSpec wanted;
    if (!google::protobuf::util::JsonStringToMessage(request.dump(), &wanted).ok()) {
      return MakeError(Reason::kInvalidArgument, "the request is no WeightSpec");
    }
    ASSIGN_OR_RETURN(const v1::WeightSpec spec, CompleteSpec(wanted));
    ASSIGN_OR_RETURN(const CheckpointIdentity identity, ReadCheckpointIdentity(RealFileSystem(), folder_));
    ASSIGN_OR_RETURN(const Checkpoint checkpoint, OpenCheckpoint(RealFileSystem(), folder_));
    ASSIGN_OR_RETURN(const Quantization quantization, CheckQuantization(checkpoint));
    ASSIGN_OR_RETURN(const NodePlan plan, PlanNode({.checkpoint = checkpoint,
                                                    .spec = spec,
                                                    .quantization = quantization,
                                                    .architectures = architectures_,
                                                    .ranks = AllRanks(spec)}));
    if (only_plan) return Json{{"read_bytes", plan.read_bytes}, {"file_bytes", checkpoint.total_bytes}};
    return Load({RealFileSystem(), checkpoint, identity, plan});
  }

 private:
  absl::StatusOr<Json> Load(const LoadSource& source) {
    std::vector<std::vector<HostSlab>> slabs;
    for (const ShardPlan& shard : source.plan.shards) {
      ASSIGN_OR_RETURN(HostSlab slab, HostSlab::Create(shard.slab_bytes[0]));
      slabs.emplace_back().push_back(std::move(slab));
    }
    std::vector<std::unique_ptr<Destination>> destinations;
    for (size_t i = 0; i < slabs.size(); ++i) {
      destinations.push_back(MakeHostDestination(source.plan.shards[i], slabs[i]));
    }
    ASSIGN_OR_RETURN(const auto digests, LoadNode(source, destinations, {}, [](int64_t) { return absl::OkStatus(); }));
    Json answer = {{"read_bytes", source.plan.read_bytes},
                   {"file_bytes", source.checkpoint.total_bytes},
                   {"ranks", Json::array()}};
    for (size_t i = 0; i < slabs.size(); ++i) {
      ASSIGN_OR_RETURN(SealedSlab sealed, std::move(slabs[i][0]).Seal());
      answer["ranks"].push_back(Describe(source.plan.shards[i], digests[i], sealed));
      slabs_.push_back(std::move(sealed));
    }
    return answer;
  }

  static Json Describe(const ShardPlan& shard, const std::vector<Digest>& digests, const SealedSlab& sealed) {
    Json tensors = Json::array();
    for (size_t i = 0; i < shard.tensors.size(); ++i) {
      const TensorPlacement& tensor = shard.tensors[i];
      tensors.push_back({{"name", tensor.name},
                         {"dtype", std::string(tensor.dtype->name)},
                         {"shape", tensor.shape},
                         {"offset_bytes", tensor.slab_offset_bytes},
                         {"size_bytes", tensor.size_bytes},
                         {"alias_of", tensor.alias_of},
                         {"digest", DigestHex(digests[i])}});
    }
    return {{"rank", shard.rank}, {"fd", sealed.fd.get()}, {"slab_bytes", sealed.size_bytes}, {"tensors", tensors}};
  }

  const std::string folder_;
  const ArchitectureSet architectures_;
  std::vector<SealedSlab> slabs_;  // of the last answer
};

Json ErrorJson(const absl::Status& status) {
  const ErrorDetails details = GetErrorDetails(status);
  return {{"reason", details.reason}, {"message", std::string(status.message())}, {"metadata", details.metadata}};
}

int Run(int argc, char** argv) {
  if (argc != 2 && argc != 3) {
    std::cerr << "usage: reference_loader FOLDER [ARCHITECTURE_DIR]\n";
    return 2;
  }
  std::map<std::string, std::string> texts;
  if (argc == 3) {
    auto read = ReadArchitectureFolder(RealFileSystem(), argv[2]);
    if (!read.ok()) {
      std::cerr << read.status() << "\n";
      return 1;
    }
    texts = *std::move(read);
  }
  auto architectures = ArchitectureSet::WithFiles(texts);
  if (!architectures.ok()) {
    std::cerr << architectures.status() << "\n";
    return 1;
  }
  ReferenceLoader loader(argv[1], *std::move(architectures));
  for (std::string line; std::getline(std::cin, line);) {
    const auto answer = loader.Answer(Json::parse(line));
    std::cout << (answer.ok() ? *answer : ErrorJson(answer.status())).dump() << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace weightbroker

int main(int argc, char** argv) { return weightbroker::Run(argc, argv); }
