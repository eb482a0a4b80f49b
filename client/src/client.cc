#include "weightbroker/client.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/attach.h"
#include "client/src/disk.h"
#include "client/src/engine_device.h"
#include "client/src/gpu_room.h"
#include "client/src/services.h"
#include "client/src/status_conversion.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"
#include "common/identity/fingerprint.h"

namespace weightbroker {
namespace client {

class ClientState {
 public:
  ClientState(ClientOptions options, std::shared_ptr<Services> services)
      : options_(std::move(options)), services_(std::move(services)) {
    environment_.set_torch_version(options_.torch_version);
  }

  // Null in Mode::kOff.
  const Services* services() const { return services_.get(); }

  absl::StatusOr<std::unique_ptr<WeightsState>> Attach(const WeightSpec& spec, const AttachOptions& options) const {
    const v1::WeightSpec proto = ToProto(spec);
    ASSIGN_OR_RETURN(const EngineDevice engine, FindEngineDevice(options.cuda_device));
    if (services_ == nullptr) {
      return FromDisk(proto, engine, options,
                      MakeError(Reason::kModeOff, "the client's mode is off: it asks no service"));
    }
    auto attached = AttachToService(*services_, proto, environment_, engine, options);
    if (attached.ok()) {
      (*attached)->source.kind = SourceKind::kAttached;
      return attached;
    }
    if (options.fallback == Fallback::kFail) return attached;
    return FromDisk(proto, engine, options, attached.status());
  }

 private:
  static v1::WeightSpec ToProto(const WeightSpec& spec) {
    v1::WeightSpec proto;
    proto.set_model(spec.model);
    proto.set_tensor_parallel_size(spec.tensor_parallel_size);
    proto.set_quantization(spec.quantization);
    proto.set_dtype(spec.dtype);
    proto.set_layout(spec.layout);
    return proto;
  }

  absl::StatusOr<std::unique_ptr<WeightsState>> FromDisk(const v1::WeightSpec& spec, const EngineDevice& engine,
                                                         const AttachOptions& options,
                                                         const absl::Status& why_not_attached) const {
    std::unique_ptr<GpuInventory> inventory;
    DiskRequest request;
    request.spec = spec;
    request.environment = environment_;
    request.model_roots = options_.model_roots;
    request.engine = engine;
    if (!engine.is_host()) request.room = RoomFor(engine, options, &inventory);
    request.rank = options.rank;
    request.threads = options.threads;
    request.on_progress = options.on_progress;
    auto loaded = LoadFromDisk(request);
    if (loaded.ok()) {
      (*loaded)->source = {SourceKind::kDisk, client::ToPublic(why_not_attached)};
      return loaded;
    }
    if (HasReason(why_not_attached, Reason::kModeOff)) return loaded;
    const ErrorDetails service = GetErrorDetails(why_not_attached);
    absl::Status both(loaded.status().code(), absl::StrCat("not from disk: ", loaded.status().message(),
                                                           "; and not from the service: ", why_not_attached.message(),
                                                           " [", service.reason, "]"));
    if (const auto info = loaded.status().GetPayload(kErrorInfoTypeUrl)) both.SetPayload(kErrorInfoTypeUrl, *info);
    return both;
  }

  // A service that cannot be asked, and a GPU whose users are not known, are done without.
  RoomOptions RoomFor(const EngineDevice& engine, const AttachOptions& options,
                      std::unique_ptr<GpuInventory>* inventory) const {
    RoomOptions room;
    if (services_ != nullptr) {
      if (const auto service = services_->For(engine.uuid); service.ok()) room.service = *service;
    }
    if (auto nvml = OpenNvml(); nvml.ok()) *inventory = *std::move(nvml);
    room.inventory = inventory->get();
    room.evict = options.evict_unleased;
    room.deadline = DeadlineIn(options.deadline);
    return room;
  }

  const ClientOptions options_;
  v1::Environment environment_;  // constant after construction
  const std::shared_ptr<Services> services_;
};

}  // namespace client

Result<Client> Client::Create(const ClientOptions& options) {
  v1::Environment environment;
  environment.set_torch_version(options.torch_version);
  if (const absl::Status status = CheckEnvironment(environment); !status.ok()) return client::ToPublic(status);

  std::shared_ptr<client::Services> services;
  if (options.mode == Mode::kClient) {
    auto opened = client::Services::Open(options.socket_path);
    if (!opened.ok()) return client::ToPublic(opened.status());
    services = *std::move(opened);
  }
  return Client(std::make_shared<client::ClientState>(options, std::move(services)));
}

Client::Client(std::shared_ptr<client::ClientState> state) : state_(std::move(state)) {}
Client::Client(Client&&) noexcept = default;
Client& Client::operator=(Client&&) noexcept = default;
Client::~Client() = default;

Status Client::WaitUntilConnected(std::chrono::milliseconds deadline) const {
  if (state_->services() == nullptr) return Status();
  return client::ToPublic(state_->services()->WaitUntilConnected(client::DeadlineIn(deadline)));
}

Result<MappedWeights> Client::Attach(const WeightSpec& spec, const AttachOptions& options) const {
  auto state = state_->Attach(spec, options);
  if (!state.ok()) return client::ToPublic(state.status());
  return MappedWeights(*std::move(state));
}

}  // namespace weightbroker
