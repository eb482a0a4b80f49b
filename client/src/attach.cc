#include "client/src/attach.h"

#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "client/src/block_signals.h"
#include "client/src/export_stream.h"
#include "client/src/map_shard.h"
#include "client/src/slab_mapping.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"
#include "common/base/thread.h"

namespace weightbroker::client {
namespace {

// One Export, from request to lease. Used once.
class Attachment {
 public:
  Attachment(std::shared_ptr<const Connection> connection, const v1::ExportRequest& request, const EngineDevice& engine,
             const AttachOptions& options, Deadline deadline)
      : connection_(std::move(connection)),
        engine_(engine),
        options_(options),
        deadline_(deadline),
        start_(Clock::now()),
        stream_(std::make_unique<ExportStream>(connection_->channel(), request)),
        state_(std::make_unique<WeightsState>()) {}

  absl::StatusOr<std::unique_ptr<WeightsState>> Run() {
    RETURN_IF_ERROR(ReadHeader());
    state_->times.header_seconds = SecondsSinceStart();
    RETURN_IF_ERROR(MapAndReadManifest());
    ASSIGN_OR_RETURN(state_->lease,
                     Lease::Start(connection_, std::move(stream_), header_,
                                  {options_.lease_renewal_deadline, options_.on_lease_event, options_.alias}));
    return std::move(state_);
  }

 private:
  using Clock = std::chrono::steady_clock;

  absl::StatusOr<RawMessage> ReadMessage() {
    ASSIGN_OR_RETURN(std::optional<RawMessage> message, stream_->Read(deadline_));
    if (message.has_value()) return *std::move(message);
    const absl::Status status = connection_->ToStatus(stream_->end_status());
    return status.ok() ? NotTrusted("a stream that ended early") : status;
  }

  absl::Status ReadHeader() {
    ASSIGN_OR_RETURN(const RawMessage message, ReadMessage());
    v1::ExportResponse response;
    const std::string_view bytes = message.bytes();
    if (!response.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())) || !response.has_header()) {
      return NotTrusted("a first message that is no header");
    }
    header_ = std::move(*response.mutable_header());
    state_->fingerprint = header_.fingerprint();
    state_->generation = header_.generation();
    return absl::OkStatus();
  }

  absl::Status MapAndReadManifest() {
    std::vector<int64_t> slab_bytes;
    for (const v1::Slab& slab : header_.slabs()) slab_bytes.push_back(slab.size_bytes());
    ManifestDecoder decoder(std::move(slab_bytes), header_.tensor_count());
    absl::Status mapped;
    std::thread mapper = StartMapping(&mapped);
    const absl::Status read = ReadManifest(decoder);
    if (mapper.joinable()) mapper.join();
    RETURN_IF_ERROR(mapped);
    RETURN_IF_ERROR(read);
    ASSIGN_OR_RETURN(state_->manifest, std::move(decoder).Finish(state_->memory->slabs()));
    return absl::OkStatus();
  }

  // A GPU's memory is mapped in a thread of its own, while the manifest arrives in this one. Host memory takes less
  // time than to start a thread: nothing is to be joined then.
  std::thread StartMapping(absl::Status* mapped) {
    if (!engine_.is_host()) {
      const BlockSignals block;
      auto mapper = StartThread("mapping GPU memory", [this, mapped] { *mapped = Map(); });
      if (mapper.ok()) return *std::move(mapper);
    }
    *mapped = Map();
    return {};
  }

  absl::Status Map() {
    ASSIGN_OR_RETURN(state_->memory, MapShard(*connection_, header_, engine_, deadline_));
    state_->times.mapped_seconds = SecondsSinceStart();
    return absl::OkStatus();
  }

  absl::Status ReadManifest(ManifestDecoder& decoder) {
    while (!decoder.complete()) {
      ASSIGN_OR_RETURN(RawMessage message, ReadMessage());
      RETURN_IF_ERROR(decoder.Add(std::move(message)));
    }
    state_->times.manifest_seconds = SecondsSinceStart();
    return absl::OkStatus();
  }

  double SecondsSinceStart() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  const std::shared_ptr<const Connection> connection_;
  const EngineDevice& engine_;
  const AttachOptions& options_;
  const Deadline deadline_;
  const Clock::time_point start_;
  std::unique_ptr<ExportStream> stream_;
  std::unique_ptr<WeightsState> state_;
  v1::ExportHeader header_;
};

// The same weights may be exported twice: the first try's lease ends with its stream.
absl::StatusOr<std::unique_ptr<WeightsState>> Export(const std::shared_ptr<const Connection>& connection,
                                                     const v1::ExportRequest& request, const EngineDevice& engine,
                                                     const AttachOptions& options) {
  const Deadline deadline = DeadlineIn(options.deadline);
  Attempts attempts(*connection, deadline);
  while (true) {
    RETURN_IF_ERROR(attempts.Begin());
    auto state = Attachment(connection, request, engine, options, deadline).Run();
    if (state.ok() || !attempts.ShallTryAgain(state.status())) return state;
  }
}

// One engine's way to its weights: what it asks the service for. Used once.
class ServiceAttach {
 public:
  ServiceAttach(const Services& services, const v1::WeightSpec& spec, const v1::Environment& environment,
                const EngineDevice& engine, const AttachOptions& options)
      : services_(services),
        spec_(spec),
        environment_(environment),
        engine_(engine),
        options_(options),
        kinds_(KindsFor(options, engine)) {}

  absl::StatusOr<std::unique_ptr<WeightsState>> Run() {
    ASSIGN_OR_RETURN(connection_, services_.For(engine_.name()));
    if (!options_.alias.empty()) return ExportByAlias();
    if (!options_.fingerprint.empty()) return ExportByFingerprint(options_.fingerprint);
    if (services_.per_gpu() && options_.devices.size() > 1) return AttachOneOfSeveralServices();
    auto state = Export(connection_, ExportBySpec(), engine_, options_);
    if (!options_.register_if_missing || !IsMissing(state.status())) return state;
    ASSIGN_OR_RETURN(const v1::WeightSet set, Register());
    return ExportByFingerprint(set.fingerprint());
  }

 private:
  // Each service tells of its own ranks only: that all ranks are there, and of the same weights, is seen from here.
  absl::StatusOr<std::unique_ptr<WeightsState>> AttachOneOfSeveralServices() {
    RanksWait wait;
    wait.deadline = DeadlineIn(options_.deadline);
    if (options_.register_if_missing) {
      RETURN_IF_ERROR(Register().status());
      wait.deadline = DeadlineIn(options_.load_deadline);
    }
    *wait.request.mutable_spec() = spec_;
    *wait.request.mutable_environment() = environment_;
    ASSIGN_OR_RETURN(const std::string fingerprint, WaitForOneFingerprint(services_, options_.devices, wait));
    return ExportByFingerprint(fingerprint);
  }

  v1::ExportRequest ExportBySpec() const {
    v1::ExportRequest request;
    *request.mutable_spec() = spec_;
    *request.mutable_environment() = environment_;
    request.set_rank(options_.rank);
    request.mutable_handle_kinds()->Add(kinds_.begin(), kinds_.end());
    request.set_hold(true);
    return request;
  }

  // Not by the spec: the files may have changed since the fingerprint was taken.
  absl::StatusOr<std::unique_ptr<WeightsState>> ExportByFingerprint(const std::string& fingerprint) const {
    v1::ExportRequest request = ExportBySpec();
    request.set_fingerprint(fingerprint);
    return Export(connection_, request, engine_, options_);
  }

  // What the alias names is the service's to say, once for each Export: the environment is compared with it.
  absl::StatusOr<std::unique_ptr<WeightsState>> ExportByAlias() const {
    if (!options_.fingerprint.empty()) {
      return MakeError(Reason::kInvalidArgument, "the options name a fingerprint and an alias: give one of them",
                       {{"field", "alias"}});
    }
    v1::ExportRequest request = ExportBySpec();
    request.set_alias(options_.alias);
    return Export(connection_, request, engine_, options_);
  }

  absl::StatusOr<v1::WeightSet> Register() const {
    v1::RegisterRequest request;
    *request.mutable_spec() = spec_;
    *request.mutable_environment() = environment_;
    PlaceAsWanted(options_, engine_, services_.per_gpu(), &request);
    request.set_wait(true);
    return RegisterAndWait(*connection_, request, DeadlineIn(options_.load_deadline), options_.on_progress);
  }

  const Services& services_;
  const v1::WeightSpec& spec_;
  const v1::Environment& environment_;
  const EngineDevice& engine_;
  const AttachOptions& options_;
  const std::vector<v1::HandleKind> kinds_;
  std::shared_ptr<const Connection> connection_;
};

LoadProgress ToPublic(const v1::RegisterProgress& progress) {
  return {WithoutPrefix(v1::WeightSetState_Name(progress.phase()), "WEIGHT_SET_STATE_"), progress.done_bytes(),
          progress.total_bytes(), progress.rate_bytes_per_second(),
          progress.has_seconds_left() ? progress.seconds_left() : -1};
}

}  // namespace

std::vector<v1::HandleKind> KindsFor(const AttachOptions& options, const EngineDevice& engine) {
  std::vector<v1::HandleKind> kinds;
  for (const HandleKind kind : options.handle_kinds) kinds.push_back(static_cast<v1::HandleKind>(kind));
  if (!kinds.empty()) return kinds;
  if (engine.is_host()) return {v1::HANDLE_KIND_HOST_MEMFD};
  return {v1::HANDLE_KIND_CUDA_VMM_FD, v1::HANDLE_KIND_CUDA_IPC};
}

void PlaceAsWanted(const AttachOptions& options, const EngineDevice& engine, bool one_service_per_gpu,
                   v1::RegisterRequest* request) {
  const std::vector<v1::HandleKind> kinds = KindsFor(options, engine);
  request->mutable_handle_kinds()->Add(kinds.begin(), kinds.end());
  if (one_service_per_gpu) request->add_ranks(options.rank);
  const bool is_single = request->spec().tensor_parallel_size() <= 1 || one_service_per_gpu;
  if (!options.devices.empty() && !one_service_per_gpu) {
    request->mutable_devices()->Add(options.devices.begin(), options.devices.end());
  } else if (!engine.is_host() && is_single) {
    request->add_devices(engine.uuid);
  }
}

bool IsMissing(const absl::Status& status) {
  return HasReason(status, Reason::kNotResident) || HasReason(status, Reason::kFingerprintMismatch) ||
         HasReason(status, Reason::kStillLoading);
}

absl::StatusOr<v1::WeightSet> RegisterAndWait(const Connection& connection, const v1::RegisterRequest& request,
                                              Deadline deadline,
                                              const std::function<void(const LoadProgress&)>& on_progress) {
  v1::RegisterResponse response;
  RETURN_IF_ERROR(connection.Call(deadline, [&](grpc::ClientContext& context) {
    response.Clear();  // of a try before this one
    const auto reader = connection.service().Register(&context, request);
    while (reader->Read(&response)) {
      if (response.has_progress() && on_progress) on_progress(ToPublic(response.progress()));
    }
    return reader->Finish();
  }));
  if (!response.has_weight_set()) {
    return MakeError(Reason::kProtocolError, "the service ended Register without giving a weight set");
  }
  return std::move(*response.mutable_weight_set());
}

absl::StatusOr<std::unique_ptr<WeightsState>> AttachToService(const Services& services, const v1::WeightSpec& spec,
                                                              const v1::Environment& environment,
                                                              const EngineDevice& engine,
                                                              const AttachOptions& options) {
  auto state = ServiceAttach(services, spec, environment, engine, options).Run();
  if (state.ok() && options.prefault == Prefault::kPopulate) {
    (*state)->memory->Prefault(ChooseThreads(options.threads));
  }
  if (state.ok() && options.verify) RETURN_IF_ERROR(VerifyAndReport(**state, options.threads));
  return state;
}

}  // namespace weightbroker::client
