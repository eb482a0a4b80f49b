#include "client/src/disk.h"

#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/src/host_memory.h"
#include "client/src/private_gpu_memory.h"
#include "common/base/error.h"
#include "common/base/file.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/checkpoint.h"
#include "common/identity/checkpoint_identity.h"
#include "common/identity/fingerprint.h"
#include "common/load/host_destination.h"
#include "common/load/load_engine.h"
#include "common/memory/host_slab.h"
#include "common/plan/architecture.h"
#include "common/plan/manifest.h"
#include "common/plan/plan.h"
#include "common/quant/gate.h"

namespace weightbroker::client {
namespace {

// As a service's catalog of devices would say them, so that the same weights have the same fingerprint wherever they
// come from.
absl::StatusOr<DeviceFacts> FactsOf(const EngineDevice& engine, GpuInventory* inventory) {
  if (engine.is_host()) return HostDeviceFacts();
  if (inventory == nullptr) {
    return MakeError(Reason::kGpuUnavailable,
                     "NVML (libnvidia-ml.so.1) cannot be opened: the driver's version, which is part of the "
                     "fingerprint, is not known");
  }
  ASSIGN_OR_RETURN(const std::vector<GpuInfo> gpus, inventory->List());
  for (const GpuInfo& gpu : gpus) {
    if (gpu.uuid != engine.uuid) continue;
    return GpuDeviceFacts(absl::StrCat(gpu.compute_major, ".", gpu.compute_minor), inventory->driver_version());
  }
  return MakeError(Reason::kDeviceUnknown, absl::StrCat("NVML does not know the GPU ", engine.uuid),
                   {{"device", engine.uuid}});
}

using ModelRoots = std::map<std::string, std::string>;

// The path that "name:relative/path" or an absolute path means; not yet whether there is anything.
absl::StatusOr<std::string> ExpandModel(const std::string& model, const ModelRoots& roots) {
  if (!model.empty() && model[0] == '/') return model;
  const size_t colon = model.find(':');
  if (colon == std::string::npos || colon == 0) {
    return MakeError(Reason::kInvalidArgument,
                     absl::StrCat("spec.model \"", model, "\" is neither \"name:relative/path\" nor an absolute path"),
                     {{"field", "spec.model"}, {"model", model}});
  }
  const std::string name = model.substr(0, colon);
  if (const auto root = roots.find(name); root != roots.end())
    return absl::StrCat(root->second, "/", model.substr(colon + 1));
  const std::string known = absl::StrJoin(roots, ", ", absl::PairFormatter("="));
  return MakeError(Reason::kModelRootUnknown,
                   absl::StrCat("spec.model \"", model, "\" names the model root \"", name,
                                "\"; to load it from disk give its folder in ClientOptions::model_roots, which has: ",
                                known.empty() ? "none" : known),
                   {{"model_root", name}, {"model_roots", known}});
}

// One load, from the words of a request to sealed and mapped memory. Used once.
class DiskLoad {
 public:
  DiskLoad(FileSystem& file_system, const DiskRequest& request) : file_system_(file_system), request_(request) {}

  absl::StatusOr<std::unique_ptr<WeightsState>> Run() {
    Report("ALLOCATING", 0);
    RETURN_IF_ERROR(Identify());
    RETURN_IF_ERROR(Plan());
    RETURN_IF_ERROR(AllocateSlabs());
    ASSIGN_OR_RETURN(const std::vector<Digest> digests, Fill());
    Report("VERIFYING", plan_.read_bytes);
    RETURN_IF_ERROR(CheckUnchanged(file_system_, identity_));
    RETURN_IF_ERROR(Protect());
    RETURN_IF_ERROR(DecodeManifest(digests));
    Report("RESIDENT", plan_.read_bytes);
    return std::move(state_);
  }

 private:
  absl::Status Identify() {
    ASSIGN_OR_RETURN(spec_, CompleteSpec(request_.spec));
    ASSIGN_OR_RETURN(const std::string path, ExpandModel(spec_.model(), request_.model_roots));
    ASSIGN_OR_RETURN(const std::string folder, file_system_.RealPath(path));
    spec_.set_model(folder);
    ASSIGN_OR_RETURN(identity_, ReadCheckpointIdentity(file_system_, folder));
    ASSIGN_OR_RETURN(const DeviceFacts facts, FactsOf(request_.engine, request_.room.inventory));
    state_->fingerprint = ComputeFingerprint(spec_, request_.environment, identity_, facts).hash;
    return absl::OkStatus();
  }

  absl::Status Plan() {
    ASSIGN_OR_RETURN(checkpoint_, OpenCheckpoint(file_system_, spec_.model()));
    ASSIGN_OR_RETURN(const Quantization quantization, CheckQuantization(checkpoint_));
    ASSIGN_OR_RETURN(plan_, PlanNode({.checkpoint = checkpoint_,
                                      .spec = spec_,
                                      .quantization = quantization,
                                      .architectures = ArchitectureSet::Embedded(),
                                      .ranks = {request_.rank},
                                      .max_slabs = request_.engine.is_host() ? kMaxHostSlabs : 1}));
    return absl::OkStatus();
  }

  absl::Status AllocateSlabs() {
    if (!request_.engine.is_host()) {
      ASSIGN_OR_RETURN(gpu_memory_, PrivateGpuMemory::Create(request_.engine, shard(), request_.room));
      return absl::OkStatus();
    }
    for (const int64_t size_bytes : shard().slab_bytes) {
      ASSIGN_OR_RETURN(HostSlab slab, HostSlab::Create(size_bytes));
      slabs_.push_back(std::move(slab));
    }
    destination_ = MakeHostDestination(shard(), slabs_);
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<Digest>> Fill() {
    LoadOptions options;
    options.reader_threads = request_.threads;
    if (gpu_memory_ != nullptr) options = gpu_memory_->Tune(options);
    const auto destinations = gpu_memory_ != nullptr ? gpu_memory_->destinations() : std::span(&destination_, 1);
    ASSIGN_OR_RETURN(const auto load, PreparedLoad::Create({file_system_, checkpoint_, identity_, plan_}, options));
    if (gpu_memory_ != nullptr) RETURN_IF_ERROR(gpu_memory_->ReserveFor(*load));
    ASSIGN_OR_RETURN(auto digests, load->Run(destinations, [this](int64_t done_bytes) {
      Report("LOADING", done_bytes);
      return absl::OkStatus();
    }));
    return std::move(digests.front());
  }

  absl::Status Protect() {
    if (gpu_memory_ == nullptr) return SealAndMap();
    ASSIGN_OR_RETURN(state_->memory, std::move(*gpu_memory_).Finish());
    return absl::OkStatus();
  }

  // Sealed like the service's memory, so that a stray write ends this process instead of changing a weight.
  absl::Status SealAndMap() {
    destination_.reset();
    auto memory = std::make_unique<HostMemory>();
    for (HostSlab& slab : slabs_) {
      ASSIGN_OR_RETURN(const SealedSlab sealed, std::move(slab).Seal());
      RETURN_IF_ERROR(memory->Map(sealed.fd.get(), sealed.size_bytes));
    }
    state_->memory = std::move(memory);
    return absl::OkStatus();
  }

  // Through the same bytes as the service's manifest, so that there is one way to get an address.
  absl::Status DecodeManifest(const std::vector<Digest>& digests) {
    ASSIGN_OR_RETURN(const std::string manifest, SerializeManifest(shard(), digests));
    ASSIGN_OR_RETURN(const std::vector<std::string_view> frames, SplitManifest(manifest));
    std::vector<int64_t> slab_bytes;
    for (const SlabView& slab : state_->memory->slabs()) slab_bytes.push_back(slab.size_bytes);
    ManifestDecoder decoder(std::move(slab_bytes), static_cast<int64_t>(shard().tensors.size()));
    for (const std::string_view frame : frames) RETURN_IF_ERROR(decoder.Add(RawMessage(frame)));
    ASSIGN_OR_RETURN(state_->manifest, std::move(decoder).Finish(state_->memory->slabs()));
    return absl::OkStatus();
  }

  const ShardPlan& shard() const { return plan_.shards.front(); }

  void Report(const char* phase, int64_t done_bytes) const {
    if (request_.on_progress) request_.on_progress({phase, done_bytes, plan_.read_bytes, 0});
  }

  FileSystem& file_system_;
  const DiskRequest& request_;
  v1::WeightSpec spec_;
  CheckpointIdentity identity_;
  Checkpoint checkpoint_;
  NodePlan plan_;  // of one shard
  std::vector<HostSlab> slabs_;
  std::unique_ptr<Destination> destination_;      // on the host
  std::unique_ptr<PrivateGpuMemory> gpu_memory_;  // on a GPU
  std::unique_ptr<WeightsState> state_ = std::make_unique<WeightsState>();
};

}  // namespace

absl::StatusOr<std::unique_ptr<WeightsState>> LoadFromDisk(const DiskRequest& request) {
  return DiskLoad(RealFileSystem(), request).Run();
}

}  // namespace weightbroker::client
