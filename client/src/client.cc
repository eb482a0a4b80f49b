#include "weightbroker/client.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/attach.h"
#include "client/src/attach_report.h"
#include "client/src/disk.h"
#include "client/src/engine_device.h"
#include "client/src/gpu_room.h"
#include "client/src/publish.h"
#include "client/src/services.h"
#include "client/src/status_conversion.h"
#include "common/base/error.h"
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

  Result<MappedWeights> Attach(const WeightSpec& spec, const AttachOptions& options) const {
    const v1::WeightSpec proto = ToProto(spec);
    const auto found = FindEngineDevice(options.cuda_device);
    if (!found.ok()) return client::ToPublic(found.status());
    const EngineDevice& engine = *found;
    if (services_ == nullptr) {
      return FromDisk(proto, engine, options,
                      MakeError(Reason::kModeOff, "the client's mode is off: it asks no service"));
    }
    auto attached = AttachToService(*services_, proto, environment_, engine, options);
    if (attached.ok()) {
      (*attached)->source.kind = SourceKind::kAttached;
      return MappedWeights(*std::move(attached));
    }
    if (options.fallback == Fallback::kFail) {
      Report(engine, v1::ReportAttachRequest::OUTCOME_FAILED, attached.status());
      return client::ToPublic(attached.status());
    }
    auto loaded = FromDisk(proto, engine, options, attached.status());
    Report(engine, loaded.ok() ? v1::ReportAttachRequest::OUTCOME_DISK : v1::ReportAttachRequest::OUTCOME_FAILED,
           attached.status());
    return loaded;
  }

  Result<MappedWeights> AttachOrPublish(const WeightSpec& spec, const Client::Loader& load,
                                        const PublishOptions& options) const {
    if (services_ == nullptr) {
      return client::ToPublic(MakeError(Reason::kModeOff, "the client's mode is off: it asks no service"));
    }
    const auto engine = FindEngineDevice(options.attach.cuda_device);
    if (!engine.ok()) return client::ToPublic(engine.status());
    Status load_failure;
    auto state =
        client::AttachOrPublish(*services_, ToProto(spec), environment_, *engine, load, options, &load_failure);
    if (!load_failure.ok()) return load_failure;
    if (!state.ok()) return client::ToPublic(state.status());
    (*state)->source.kind = SourceKind::kAttached;
    return MappedWeights(*std::move(state));
  }

 private:
  static v1::WeightSpec ToProto(const WeightSpec& spec) {
    v1::WeightSpec proto;
    proto.set_model(spec.model);
    proto.set_tensor_parallel_size(spec.tensor_parallel_size);
    proto.set_quantization(spec.quantization);
    proto.set_dtype(spec.dtype);
    proto.set_layout(spec.layout);
    proto.set_pipeline_parallel_size(spec.pipeline_parallel_size);
    proto.set_expert_parallel_size(spec.expert_parallel_size);
    proto.set_data_parallel_size(spec.data_parallel_size);
    proto.set_mtp_layers(spec.mtp_layers);
    proto.mutable_unquantized_modules()->Assign(spec.unquantized_modules.begin(), spec.unquantized_modules.end());
    proto.set_engine(spec.engine);
    proto.set_engine_version(spec.engine_version);
    return proto;
  }

  void Report(const EngineDevice& engine, v1::ReportAttachRequest::Outcome outcome, const absl::Status& why_not) const {
    const auto service = services_->For(engine.name());
    if (service.ok()) ReportNotAttached(**service, outcome, why_not);
  }

  Result<MappedWeights> FromDisk(const v1::WeightSpec& spec, const EngineDevice& engine, const AttachOptions& options,
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
      return MappedWeights(*std::move(loaded));
    }
    const Status disk = client::ToPublic(loaded.status());
    if (HasReason(why_not_attached, Reason::kModeOff)) return disk;
    const Status service = client::ToPublic(why_not_attached);
    Status::Metadata metadata = disk.metadata();
    metadata["service_reason"] = service.reason();
    return Status(disk.code(), disk.reason(),
                  "not from disk: " + disk.message() + "; and not from the service: " + service.message() + " [" +
                      service.reason() + "]",
                  std::move(metadata));
  }

  // A service that cannot be asked, and a GPU whose users are not known, are done without.
  RoomOptions RoomFor(const EngineDevice& engine, const AttachOptions& options,
                      std::unique_ptr<GpuInventory>* inventory) const {
    RoomOptions room;
    if (services_ != nullptr) {
      if (const auto service = services_->For(engine.name()); service.ok()) room.service = service->get();
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

ConnectionOptions ToConnectionOptions(const ClientOptions& options) {
  ConnectionOptions connection{.socket_path = options.socket_path};
  if (options.mode != Mode::kDaemon) return connection;
  connection.daemon = {options.daemon.program, {}, options.daemon.log_path};
  for (const auto& [name, folder] : options.model_roots) {
    connection.daemon->flags.push_back(absl::StrCat("--model_roots=", name, "=", folder));
  }
  connection.daemon->flags.insert(connection.daemon->flags.end(), options.daemon.flags.begin(),
                                  options.daemon.flags.end());
  return connection;
}

}  // namespace client

Result<Client> Client::Create(const ClientOptions& options) {
  v1::Environment environment;
  environment.set_torch_version(options.torch_version);
  if (const absl::Status status = CheckEnvironment(environment); !status.ok()) return client::ToPublic(status);

  std::shared_ptr<client::Services> services;
  if (options.mode != Mode::kOff) {
    auto opened = client::Services::Open(client::ToConnectionOptions(options));
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
  return state_->Attach(spec, options);
}

Result<MappedWeights> Client::AttachOrPublish(const WeightSpec& spec, const Loader& load,
                                              const PublishOptions& options) const {
  return state_->AttachOrPublish(spec, load, options);
}

}  // namespace weightbroker
