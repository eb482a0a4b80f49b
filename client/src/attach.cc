#include "client/src/attach.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/src/export_stream.h"
#include "client/src/redeem_ticket.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"

namespace weightbroker::client {
namespace {

absl::Status NotTrusted(const std::string& what) {
  return MakeError(Reason::kProtocolError,
                   absl::StrCat("the service answered Export with ", what,
                                "; service and client library may be of different versions"),
                   {{"fault", what}});
}

// One Export, from request to lease. Used once.
class Attachment {
 public:
  Attachment(std::shared_ptr<const Connection> connection, const v1::ExportRequest& request,
             const AttachOptions& options, Deadline deadline)
      : connection_(std::move(connection)),
        options_(options),
        deadline_(deadline),
        stream_(std::make_unique<ExportStream>(connection_->channel(), request)),
        state_(std::make_unique<WeightsState>()) {}

  absl::StatusOr<std::unique_ptr<WeightsState>> Run() {
    RETURN_IF_ERROR(ReadHeader());
    // The service sends the manifest into the socket meanwhile: with the slabs mapped first, each tensor gets its
    // address as it is decoded.
    RETURN_IF_ERROR(MapSlabs());
    RETURN_IF_ERROR(ReadManifest());
    ASSIGN_OR_RETURN(state_->lease, Lease::Start(connection_, std::move(stream_), header_,
                                                 {options_.lease_renewal_deadline, options_.on_lease_event}));
    return std::move(state_);
  }

 private:
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

  absl::Status MapSlabs() {
    if (header_.slabs().empty()) return absl::OkStatus();  // every tensor is empty
    ASSIGN_OR_RETURN(const std::vector<UniqueFd> fds,
                     RedeemTicket(connection_->socket_path(), header_.ticket(),
                                  static_cast<size_t>(header_.slabs_size()), deadline_));
    if (static_cast<int>(fds.size()) != header_.slabs_size()) {
      return NotTrusted(absl::StrCat(fds.size(), " descriptors for ", header_.slabs_size(), " slabs"));
    }
    for (int i = 0; i < header_.slabs_size(); ++i) {
      const v1::Slab& slab = header_.slabs(i);
      if (slab.handle_kind() != v1::HANDLE_KIND_HOST_MEMFD || slab.size_bytes() <= 0) {
        return NotTrusted(absl::StrCat("a slab of kind ", v1::HandleKind_Name(slab.handle_kind()), " and ",
                                       slab.size_bytes(), " bytes"));
      }
      ASSIGN_OR_RETURN(SlabMapping mapping, SlabMapping::Map(fds[static_cast<size_t>(i)].get(), slab.size_bytes()));
      state_->slabs.push_back(std::move(mapping));
    }
    return absl::OkStatus();
  }

  absl::Status ReadManifest() {
    std::vector<SlabView> views;
    for (const SlabMapping& slab : state_->slabs) views.push_back(slab.view());
    ManifestDecoder decoder(std::move(views), header_.tensor_count());
    while (!decoder.complete()) {
      ASSIGN_OR_RETURN(RawMessage message, ReadMessage());
      RETURN_IF_ERROR(decoder.Add(std::move(message)));
    }
    ASSIGN_OR_RETURN(state_->manifest, std::move(decoder).Finish());
    return absl::OkStatus();
  }

  const std::shared_ptr<const Connection> connection_;
  const AttachOptions& options_;
  const Deadline deadline_;
  std::unique_ptr<ExportStream> stream_;
  std::unique_ptr<WeightsState> state_;
  v1::ExportHeader header_;
};

// The same weights may be exported twice: the first try's lease ends with its stream.
absl::StatusOr<std::unique_ptr<WeightsState>> Export(const std::shared_ptr<const Connection>& connection,
                                                     const v1::ExportRequest& request, const AttachOptions& options) {
  const Deadline deadline = DeadlineIn(options.deadline);
  Attempts attempts(*connection, deadline);
  while (true) {
    RETURN_IF_ERROR(attempts.Begin());
    auto state = Attachment(connection, request, options, deadline).Run();
    if (state.ok() || !attempts.ShallTryAgain(state.status())) return state;
  }
}

v1::ExportRequest MakeExportRequest(const v1::WeightSpec& spec, const v1::Environment& environment, int32_t rank) {
  v1::ExportRequest request;
  *request.mutable_spec() = spec;
  *request.mutable_environment() = environment;
  request.set_rank(rank);
  request.add_handle_kinds(v1::HANDLE_KIND_HOST_MEMFD);
  request.set_hold(true);
  return request;
}

LoadProgress ToPublic(const v1::RegisterProgress& progress) {
  return {WithoutPrefix(v1::WeightSetState_Name(progress.phase()), "WEIGHT_SET_STATE_"), progress.done_bytes(),
          progress.total_bytes(), progress.rate_bytes_per_second()};
}

}  // namespace

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

absl::StatusOr<std::unique_ptr<WeightsState>> AttachToService(const std::shared_ptr<const Connection>& connection,
                                                              const v1::WeightSpec& spec,
                                                              const v1::Environment& environment,
                                                              const AttachOptions& options) {
  v1::ExportRequest request = MakeExportRequest(spec, environment, options.rank);
  if (!options.fingerprint.empty()) request.set_fingerprint(options.fingerprint);
  auto state = Export(connection, request, options);
  if (options.register_if_missing && options.fingerprint.empty() && IsMissing(state.status())) {
    v1::RegisterRequest registration;
    *registration.mutable_spec() = spec;
    *registration.mutable_environment() = environment;
    registration.add_handle_kinds(v1::HANDLE_KIND_HOST_MEMFD);
    registration.set_wait(true);
    ASSIGN_OR_RETURN(const v1::WeightSet set, RegisterAndWait(*connection, registration,
                                                              DeadlineIn(options.load_deadline), options.on_progress));
    request.set_fingerprint(set.fingerprint());  // not the spec again: the files may have changed meanwhile
    state = Export(connection, request, options);
  }
  if (state.ok() && options.prefault == Prefault::kPopulate) {
    for (const SlabMapping& slab : (*state)->slabs) slab.Prefault(ChooseThreads(options.threads));
  }
  return state;
}

}  // namespace weightbroker::client
