#include "server/broker/export_call.h"

#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/slice.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/alias_name.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "server/broker/spec_resolution.h"
#include "server/broker/timestamp.h"

namespace weightbroker {
namespace {

grpc::ByteBuffer Serialize(const v1::ExportResponse& response) {
  const grpc::Slice slice(response.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

// A message that shares the manifest's memory, which stays for as long as gRPC needs it.
grpc::ByteBuffer ShareFrame(std::string_view frame, const std::shared_ptr<const Manifest>& manifest) {
  using Hold = std::shared_ptr<const Manifest>;
  const grpc::Slice slice(
      const_cast<char*>(frame.data()), frame.size(), [](void* hold) { delete static_cast<Hold*>(hold); },
      new Hold(manifest));
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace

ExportCall::ExportCall(const ServiceContext& context, CallRecord record, const grpc::ByteBuffer& request)
    : StreamCall(std::move(record)), context_(context) {
  grpc::ByteBuffer buffer(request);  // parsing consumes it
  request_parsed_ = grpc::SerializationTraits<v1::ExportRequest>::Deserialize(&buffer, &request_).ok();
  ObserveDurationWhenIdle();
}

ExportCall::~ExportCall() { DropLease("stream ended"); }

void ExportCall::Start() {
  if (const absl::Status status = StartExport(); !status.ok()) Refuse(status);
}

absl::Status ExportCall::StartExport() {
  RETURN_IF_ERROR(record().CheckCaller());
  if (!request_parsed_) return MakeError(Reason::kInvalidArgument, "the request is not an ExportRequest");
  if (request_.has_renewal() && !(request_.has_fingerprint() && request_.hold())) {
    return MakeError(Reason::kInvalidArgument, "a renewal names its weight set by fingerprint, and holds it",
                     {{"field", "renewal"}});
  }
  if (!request_.renewal().alias().empty()) RETURN_IF_ERROR(CheckAliasName(request_.renewal().alias()));
  switch (request_.target_case()) {
    case v1::ExportRequest::kFingerprint:
      return ExportByFingerprint();
    case v1::ExportRequest::kAlias:
      return ExportByAlias();
    case v1::ExportRequest::kSpec:
      return context_.workers->TrySubmit([self = Self()] { self->RunBySpec(); }) ? absl::OkStatus()
                                                                                 : WorkersBusyError();
    default:
      return MakeError(Reason::kInvalidArgument,
                       "the request names no weight set: give a spec, a fingerprint or an alias",
                       {{"field", "target"}});
  }
}

void ExportCall::RunBySpec() {
  absl::Status status = record().CheckInTime();
  if (status.ok()) status = ExportBySpec();
  if (!status.ok()) Refuse(status);
}

absl::Status ExportCall::ExportBySpec() {
  const auto resolved = ResolveSpec(context_, request_.spec(), request_.environment());
  if (!resolved.ok()) return ExportUnverified(resolved.status());
  const SetsOfSpec found = FindSets(*context_.registry, *resolved);
  if (!found.same.empty()) {
    CountCheck(FingerprintCheck::kMatch);
    identity_state_ = v1::IDENTITY_STATE_VERIFIED;
    return ExportSet(ChooseSet(found.same));
  }
  CountCheck(found.closest.has_value() ? FingerprintCheck::kMismatch : FingerprintCheck::kAbsent);
  if (found.closest.has_value()) return MismatchError(*context_.metrics, *found.closest);
  return MakeError(Reason::kNotResident,
                   absl::StrCat("no weight set of ", resolved->spec.model(), " is resident; call Register to load it"),
                   {{"model", resolved->spec.model()}});
}

// The spec cannot be resolved: if it is because files are gone that what is resident was made from, that set is what
// was meant, and whether it may be exported is the operator's to say.
absl::Status ExportCall::ExportUnverified(const absl::Status& cause) {
  const std::vector<WeightSetRef> sets = FindSetsOfGoneFiles(context_, request_.spec(), request_.environment());
  CountCheck(sets.empty() ? FingerprintCheck::kFailed : FingerprintCheck::kUnverified);
  if (sets.empty()) return cause;
  const WeightSetRef set = ChooseSet(sets);
  const bool allowed = context_.exports_unverified;
  const std::string& fingerprint = set->fingerprint().hash;
  context_.metrics->CountUnverifiedExport(allowed);
  Log(LogLevel::kWarning, "export.unverified",
      {{"identity", "unverified"},
       {"allowed", allowed ? "true" : "false"},
       {"fingerprint", fingerprint},
       {"cause", std::string(cause.message())}});
  if (!allowed) {
    return MakeError(Reason::kModelNotFound,
                     absl::StrCat(std::string(cause.message()),
                                  "; weights made from these files are resident, but no longer known to be theirs: "
                                  "restore the files, name the set by its fingerprint, ",
                                  fingerprint, ", or have the service started with --unverified_exports=allow"),
                     {{"model", set->spec().model()}, {"fingerprint", fingerprint}, {"identity", "unverified"}});
  }
  identity_state_ = v1::IDENTITY_STATE_UNVERIFIED;
  return ExportSet(set);
}

void ExportCall::CountCheck(FingerprintCheck result) const { context_.metrics->outcomes().CountCheck(result); }

// Of sets that differ only in their devices: one that can be had, of the kind that the caller likes best.
WeightSetRef ExportCall::ChooseSet(const std::vector<WeightSetRef>& sets) const {
  const auto& kinds = request_.handle_kinds();
  const auto rank = [&](const WeightSetRef& set) {
    const bool resident = context_.registry->View(set).state == v1::WEIGHT_SET_STATE_RESIDENT;
    const auto kind = std::find(kinds.begin(), kinds.end(), static_cast<int>(set->placement().handle_kind));
    return std::make_tuple(!kinds.empty() && kind == kinds.end(), !resident, kind - kinds.begin());
  };
  return *std::min_element(sets.begin(), sets.end(),
                           [&](const WeightSetRef& a, const WeightSetRef& b) { return rank(a) < rank(b); });
}

absl::Status ExportCall::ExportByFingerprint() {
  if (request_.has_environment()) RETURN_IF_ERROR(CheckEnvironment(request_.environment()));
  const WeightSetRef set = context_.registry->Find(request_.fingerprint());
  if (set == nullptr) {
    CountCheck(FingerprintCheck::kAbsent);
    return MakeError(Reason::kNotResident,
                     absl::StrCat("no weight set with fingerprint ", Quote(request_.fingerprint()),
                                  " is resident (all 64 digits are needed); call Register to load it"),
                     {{"fingerprint", Printable(request_.fingerprint())}});
  }
  RETURN_IF_ERROR(CheckEnvironmentOf(set));
  return ExportSet(set);
}

// The alias is resolved once. That its set is gone before the lease is taken can only be because the alias names
// another by now, and then that one is meant.
absl::Status ExportCall::ExportByAlias() {
  if (request_.has_environment()) RETURN_IF_ERROR(CheckEnvironment(request_.environment()));
  ASSIGN_OR_RETURN(WeightSetRef set, context_.registry->FindByAlias(request_.alias()));
  while (true) {
    RETURN_IF_ERROR(CheckEnvironmentOf(set));
    const absl::Status exported = ExportSet(set);
    if (!HasReason(exported, Reason::kNotResident)) return exported;
    ASSIGN_OR_RETURN(WeightSetRef now, context_.registry->FindByAlias(request_.alias()));
    if (now == set) return exported;
    set = std::move(now);
  }
}

std::string ExportCall::FollowedAlias() const {
  return request_.has_renewal() ? request_.renewal().alias() : request_.alias();
}

void ExportCall::FollowAlias(const Lease& lease) {
  if (FollowedAlias().empty()) return;
  context_.registry->Follow(lease, FollowedAlias(),
                            [weak = weak_from_this()](const std::string& alias, const std::string& fingerprint) {
                              const auto self = std::static_pointer_cast<ExportCall>(weak.lock());
                              if (self != nullptr) self->OnSuperseded(alias, fingerprint);
                            });
}

absl::Status ExportCall::CheckEnvironmentOf(const WeightSetRef& set) const {
  const std::string& requested = request_.environment().torch_version();
  const std::string& resident = set->environment().torch_version();
  const bool matches = !request_.has_environment() || requested == resident;
  CountCheck(matches ? FingerprintCheck::kMatch : FingerprintCheck::kMismatch);
  if (matches) return absl::OkStatus();
  v1::FingerprintDifference difference;
  difference.set_field("environment.torch_version");
  difference.set_requested(requested);
  difference.set_resident(resident);
  return MismatchError(*context_.metrics, {set, request_.fingerprint(), {difference}});
}

absl::Status ExportCall::ExportSet(const WeightSetRef& set) {
  NameObject(set->fingerprint().hash);
  RETURN_IF_ERROR(CheckHandleKindCount(request_.handle_kinds_size()));
  std::vector<v1::HandleKind> kinds;
  for (const int kind : request_.handle_kinds()) kinds.push_back(static_cast<v1::HandleKind>(kind));
  if (request_.has_renewal()) RETURN_IF_ERROR(CheckRenewal(set));
  return request_.hold() ? Grant(set, kinds) : ShowOnly(set, kinds);
}

// A registration is resident once and never again, so what holds here still does when the lease is taken.
absl::Status ExportCall::CheckRenewal(const WeightSetRef& set) const {
  const v1::LeaseRenewal& renewal = request_.renewal();
  const WeightSetView view = context_.registry->View(set);
  google::protobuf::Timestamp resident_time;
  SetTimestamp(view.resident_time, &resident_time);
  if (renewal.generation() == view.generation && renewal.resident_time().seconds() == resident_time.seconds() &&
      renewal.resident_time().nanos() == resident_time.nanos()) {
    return absl::OkStatus();
  }
  return MakeError(Reason::kGenerationMismatch,
                   absl::StrCat("the lease was on generation ", renewal.generation(), " of the weight set ",
                                set->fingerprint().hash, ", which has been released; the present one is generation ",
                                view.generation, ", in other memory: attach again to share it"),
                   {{"fingerprint", set->fingerprint().hash},
                    {"wanted_generation", absl::StrCat(renewal.generation())},
                    {"generation", absl::StrCat(view.generation)}});
}

absl::Status ExportCall::ShowOnly(const WeightSetRef& set, const std::vector<v1::HandleKind>& kinds) {
  ASSIGN_OR_RETURN(const auto shard, context_.registry->Look(set, request_.rank(), kinds));
  v1::ExportHeader header;
  SendHeader(&header, set, *shard);
  SendManifest(*shard);
  context_.metrics->CountExport(ExportResult::kLooked);
  End(absl::OkStatus());
  return absl::OkStatus();
}

absl::Status ExportCall::Grant(const WeightSetRef& set, const std::vector<v1::HandleKind>& kinds) {
  const auto tell = [weak = weak_from_this()](void (ExportCall::*what)(const std::string&)) {
    return [weak, what](const std::string& message) {
      const auto self = std::static_pointer_cast<ExportCall>(weak.lock());
      if (self != nullptr) (self.get()->*what)(message);
    };
  };
  ASSIGN_OR_RETURN(Lease lease, context_.registry->Acquire(set, request_.rank(), kinds, tell(&ExportCall::OnLeaseEnded),
                                                           tell(&ExportCall::OnQuarantined)));
  const std::shared_ptr<const Shard> shard = lease.shard();
  const bool renewed = request_.has_renewal();
  v1::ExportHeader header;
  header.set_lease_id(lease.id());
  if (!renewed) {
    RETURN_IF_ERROR(CheckExportable(*shard));
    AddHandles(*shard, &header);
  }
  Log(LogLevel::kInfo, renewed ? "export.renewed" : "export.granted",
      {{"lease", absl::StrCat(lease.id())},
       {"fingerprint", set->fingerprint().hash},
       {"rank", absl::StrCat(shard->rank)},
       {"uid", absl::StrCat(record().peer().uid)},
       {"peer_pid", absl::StrCat(record().peer().pid)}});
  record().AuditDone(set->fingerprint().hash);
  context_.metrics->CountExport(renewed ? ExportResult::kRenewed : ExportResult::kGranted);
  context_.metrics->outcomes().NoteExport(
      std::chrono::duration<double>(context_.clock->WallNow().time_since_epoch()).count());
  FollowAlias(lease);
  if (!KeepLease(std::move(lease))) return absl::OkStatus();
  SendHeader(&header, set, *shard);
  if (!renewed) SendManifest(*shard);

  std::optional<std::string> ended;
  std::optional<std::string> superseded;
  std::optional<std::string> quarantined;
  {
    MutexLock lock(lease_mutex_);
    shard_sent_ = true;
    ended = ended_;
    superseded = superseded_;
    quarantined = quarantined_;
  }
  if (quarantined.has_value()) OnQuarantined(*quarantined);
  if (superseded.has_value()) OnSuperseded(FollowedAlias(), *superseded);
  if (ended.has_value()) OnLeaseEnded(*ended);
  return absl::OkStatus();
}

// Keeps the lease for as long as the caller stays; false if the caller has left already.
bool ExportCall::KeepLease(Lease lease) {
  {
    MutexLock lock(lease_mutex_);
    lease_ = std::move(lease);
    if (!left_) return true;
  }
  DropLease("the caller left");
  return false;
}

// What maps the slabs: the IPC handles themselves, or a ticket for descriptors.
void ExportCall::AddHandles(const Shard& shard, v1::ExportHeader* header) const {
  for (v1::Slab& slab : SlabsWithHandles(shard)) *header->add_slabs() = std::move(slab);
  if (shard.slab_fds->empty()) return;
  const Ticket ticket = context_.tickets->Issue(
      {.uid = record().peer().uid, .lease_id = header->lease_id(), .fds = shard.slab_fds}, context_.ticket_lifetime);
  header->set_ticket(ticket.data(), ticket.size());
  SetTimestamp(context_.clock->WallNow() + context_.ticket_lifetime, header->mutable_ticket_expire_time());
}

// `header` has what is of the lease; the rest is of the set.
void ExportCall::SendHeader(v1::ExportHeader* header, const WeightSetRef& set, const Shard& shard) {
  const WeightSetView view = context_.registry->View(set);
  header->set_fingerprint(set->fingerprint().hash);
  header->set_generation(view.generation);
  header->set_identity_state(identity_state_);
  SetTimestamp(view.resident_time, header->mutable_resident_time());
  header->set_rank(shard.rank);
  header->set_device(shard.device);
  if (header->slabs().empty()) *header->mutable_slabs() = {shard.slabs.begin(), shard.slabs.end()};
  header->set_tensor_count(shard.tensor_count);
  v1::ExportResponse response;
  *response.mutable_header() = std::move(*header);
  Send(Serialize(response));
}

void ExportCall::SendManifest(const Shard& shard) {
  for (const std::string_view frame : shard.manifest->frames()) Send(ShareFrame(frame, shard.manifest));
}

void ExportCall::Refuse(const absl::Status& status) {
  context_.metrics->CountExport(ExportResult::kRefused);
  const bool is_about_the_set = absl::IsNotFound(status) || absl::IsFailedPrecondition(status);
  const absl::Status serving = context_.registry->CheckServing();
  const absl::Status& said = is_about_the_set && !serving.ok() ? serving : status;
  context_.metrics->outcomes().CountExportRefusal(GetErrorDetails(said).reason);
  End(said);
}

// The registry has ended the lease, or wants it back: say so once the caller has all of the manifest, and give it back
// now.
void ExportCall::OnLeaseEnded(const std::string& message) {
  {
    MutexLock lock(lease_mutex_);
    if (!shard_sent_) {
      ended_ = message;
      return;
    }
  }
  DropLease(message);
  v1::ExportResponse response;
  response.mutable_event()->set_kind(v1::ExportEvent::KIND_DRAINING);
  response.mutable_event()->set_message(message);
  SendAndEnd(Serialize(response), absl::OkStatus());
}

// The lease goes on: what the engine makes of it is the engine's to say.
void ExportCall::OnSuperseded(const std::string& alias, const std::string& fingerprint) {
  {
    MutexLock lock(lease_mutex_);
    if (!shard_sent_) {
      superseded_ = fingerprint;
      return;
    }
  }
  v1::ExportResponse response;
  v1::ExportEvent& event = *response.mutable_event();
  event.set_kind(v1::ExportEvent::KIND_SUPERSEDED);
  event.set_alias(alias);
  event.set_fingerprint(fingerprint);
  event.set_message(absl::StrCat("alias ", alias, " names ", fingerprint, " now; what is mapped stays valid"));
  Send(Serialize(response));
}

// The lease goes on: the memory stays where it is until the engine has left it. A ticket that is still out is not
// honoured any more.
void ExportCall::OnQuarantined(const std::string& why) {
  int64_t lease_id = 0;
  {
    MutexLock lock(lease_mutex_);
    lease_id = lease_.id();
    if (!shard_sent_) quarantined_ = why;
  }
  context_.tickets->Revoke(lease_id);
  {
    MutexLock lock(lease_mutex_);
    if (!shard_sent_) return;
  }
  v1::ExportResponse response;
  response.mutable_event()->set_kind(v1::ExportEvent::KIND_QUARANTINED);
  response.mutable_event()->set_message(why);
  Send(Serialize(response));
}

void ExportCall::OnLeft() { DropLease("the caller left"); }

void ExportCall::DropLease(const std::string& cause) {
  Lease lease;
  {
    MutexLock lock(lease_mutex_);
    left_ = true;
    lease = std::move(lease_);
  }
  if (!lease.held()) return;
  context_.tickets->Revoke(lease.id());
  const int64_t id = lease.id();
  lease.Drop();
  Log(LogLevel::kInfo, "export.ended",
      {{"lease", absl::StrCat(id)},
       {"cause", cause},
       {"uid", absl::StrCat(record().peer().uid)},
       {"peer_pid", absl::StrCat(record().peer().pid)}});
}

}  // namespace weightbroker
