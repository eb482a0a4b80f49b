#include "server/broker/weight_broker_service.h"

#include <unistd.h>

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/plan/plan.h"
#include "server/broker/call_record.h"
#include "server/broker/commit_call.h"
#include "server/broker/export_call.h"
#include "server/broker/publisher_call.h"
#include "server/broker/register_call.h"
#include "server/broker/timestamp.h"

namespace weightbroker {
namespace {

void WriteFingerprint(const Fingerprint& fingerprint, v1::FingerprintResponse* response) {
  response->set_fingerprint(fingerprint.hash);
  for (const auto& [field, value] : fingerprint.components) {
    v1::FingerprintComponent& component = *response->add_components();
    component.set_field(field);
    component.set_value(value);
  }
}

// The negation refuses what is no number, too.
absl::Status CheckAttachSeconds(double seconds) {
  constexpr double kMostSeconds = 24 * 60 * 60;
  if (!(seconds >= 0 && seconds <= kMostSeconds)) {
    return MakeError(Reason::kInvalidArgument,
                     absl::StrCat("seconds: ", seconds, " is not from 0 to ", kMostSeconds, ", a day"),
                     {{"field", "seconds"}, {"found", absl::StrCat(seconds)}});
  }
  return absl::OkStatus();
}

}  // namespace

grpc::ServerWriteReactor<v1::RegisterResponse>* WeightBrokerServiceImpl::Register(
    grpc::CallbackServerContext* grpc_context, const v1::RegisterRequest* request) {
  const auto call = std::make_shared<RegisterCall>(
      context_, CallRecord(context_, RpcMethod::kRegister, grpc_context->peer()), *request);
  auto* const reactor = call->Attach(grpc_context);
  call->Start();
  return reactor;
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* WeightBrokerServiceImpl::Export(grpc::CallbackServerContext* grpc_context,
                                                                            const grpc::ByteBuffer* request) {
  const auto call =
      std::make_shared<ExportCall>(context_, CallRecord(context_, RpcMethod::kExport, grpc_context->peer()), *request);
  auto* const reactor = call->Attach(grpc_context);
  call->Start();
  return reactor;
}

grpc::ServerUnaryReactor* WeightBrokerServiceImpl::Fingerprint(grpc::CallbackServerContext* grpc_context,
                                                               const v1::FingerprintRequest* request,
                                                               v1::FingerprintResponse* response) {
  auto* const reactor = grpc_context->DefaultReactor();
  const auto record = std::make_shared<CallRecord>(context_, RpcMethod::kFingerprint, grpc_context->peer());
  if (const absl::Status status = record->CheckCaller(); !status.ok()) {
    reactor->Finish(record->End(status));
    return reactor;
  }
  // Request and response live until Finish, also when the caller leaves.
  const bool taken = context_.workers->TrySubmit([this, reactor, record, request, response] {
    absl::Status status = record->CheckInTime();
    if (status.ok()) status = AnswerFingerprint(*request, response);
    reactor->Finish(record->End(status));
  });
  if (!taken) reactor->Finish(record->End(WorkersBusyError()));
  return reactor;
}

absl::Status WeightBrokerServiceImpl::AnswerFingerprintOfAlias(const std::string& alias,
                                                               v1::FingerprintResponse* response) const {
  ASSIGN_OR_RETURN(const WeightSetRef set, context_.registry->FindByAlias(alias));
  WriteFingerprint(set->fingerprint(), response);
  response->set_resident(context_.registry->View(set).state == v1::WEIGHT_SET_STATE_RESIDENT);
  return absl::OkStatus();
}

absl::Status WeightBrokerServiceImpl::AnswerFingerprint(const v1::FingerprintRequest& request,
                                                        v1::FingerprintResponse* response) const {
  if (!request.alias().empty()) return AnswerFingerprintOfAlias(request.alias(), response);
  ASSIGN_OR_RETURN(const ResolvedSpec resolved, ResolveSpec(context_, request.spec(), request.environment()));
  const SetsOfSpec found = FindSets(*context_.registry, resolved);
  ASSIGN_OR_RETURN(const auto fingerprint, FingerprintFor(request, resolved, found));
  WriteFingerprint(fingerprint, response);
  const WeightSetRef same = context_.registry->Find(fingerprint.hash);
  response->set_resident(same != nullptr && context_.registry->View(same).state == v1::WEIGHT_SET_STATE_RESIDENT);
  if (response->resident()) return absl::OkStatus();
  RETURN_IF_ERROR(context_.registry->CheckServing());
  if (found.closest.has_value()) {
    response->set_compared_with(found.closest->set->fingerprint().hash);
    *response->mutable_differences() = {found.closest->differences.begin(), found.closest->differences.end()};
  }
  return absl::OkStatus();
}

// On the devices that are named, or where a set of the spec is resident, or on the one that Register takes first.
absl::StatusOr<weightbroker::Fingerprint> WeightBrokerServiceImpl::FingerprintFor(const v1::FingerprintRequest& request,
                                                                                  const ResolvedSpec& resolved,
                                                                                  const SetsOfSpec& found) const {
  if (!request.devices().empty()) {
    v1::RegisterRequest registration;
    *registration.mutable_devices() = request.devices();
    ASSIGN_OR_RETURN(const Placement placement,
                     PlaceRanks(registration, WorldSize(resolved.spec), context_.devices->Served()));
    return resolved.FingerprintOn(context_.devices->FactsOf(placement.ranks));
  }
  for (const WeightSetRef& set : found.same) {
    if (context_.registry->View(set).state == v1::WEIGHT_SET_STATE_RESIDENT) return set->fingerprint();
  }
  const RankPlacement first[] = {{0, context_.devices->Served().front().name}};
  return resolved.FingerprintOn(context_.devices->FactsOf(first));
}

grpc::ServerUnaryReactor* WeightBrokerServiceImpl::AllocateSlabs(grpc::CallbackServerContext* grpc_context,
                                                                 const v1::AllocateSlabsRequest* request,
                                                                 v1::AllocateSlabsResponse* response) {
  auto* const reactor = grpc_context->DefaultReactor();
  const auto record = std::make_shared<CallRecord>(context_, RpcMethod::kAllocateSlabs, grpc_context->peer());
  absl::Status status = record->CheckCaller();
  std::shared_ptr<Publication> publication;
  if (status.ok()) {
    auto found = context_.publications->Find(request->publication_token(), record->peer().uid);
    status = found.status();
    if (found.ok()) publication = *std::move(found);
  }
  if (!status.ok()) {
    reactor->Finish(record->End(status));
    return reactor;
  }
  // The response lives until Finish, also when the caller leaves.
  const auto answer = [this, reactor, record, publication, response](const absl::StatusOr<WritableMemory>& memory) {
    if (memory.ok()) *response->mutable_slabs() = DescribeWritable(context_, publication->facts(), *memory);
    reactor->Finish(record->End(memory.status()));
  };
  const auto allocate = [publication, request, answer] {
    publication->Allocate({request->slab_bytes().begin(), request->slab_bytes().end()}, answer);
  };
  // It may have to wait until sets have been evicted, and on a GPU for the driver, which takes its time.
  const bool is_on_host = publication->facts().place.device == kHostDevice;
  if (!(is_on_host ? context_.workers : context_.device_workers)->TrySubmit(allocate)) answer(WorkersBusyError());
  return reactor;
}

grpc::ServerReadReactor<v1::CommitRequest>* WeightBrokerServiceImpl::Commit(grpc::CallbackServerContext* grpc_context,
                                                                            v1::CommitResponse* response) {
  return std::make_shared<CommitCall>(context_, CallRecord(context_, RpcMethod::kCommit, grpc_context->peer()),
                                      response)
      ->Start();
}

grpc::ServerUnaryReactor* WeightBrokerServiceImpl::Health(grpc::CallbackServerContext* grpc_context,
                                                          const v1::HealthRequest*, v1::HealthResponse* response) {
  auto* const reactor = grpc_context->DefaultReactor();
  const auto record = std::make_shared<CallRecord>(context_, RpcMethod::kHealth, grpc_context->peer());
  if (const absl::Status status = record->CheckCaller(); !status.ok()) {
    reactor->Finish(record->End(status));
    return reactor;
  }
  if (const auto facts = context_.health_facts->Fresh(); facts.has_value()) {
    FillHealth(*facts, response);
    reactor->Finish(record->End(absl::OkStatus()));
    return reactor;
  }
  const bool taken = context_.health_worker->TrySubmit([this, reactor, record, response] {
    const absl::Status status = record->CheckInTime();
    if (status.ok()) FillHealth(context_.health_facts->Get(), response);
    reactor->Finish(record->End(status));
  });
  if (!taken) reactor->Finish(record->End(WorkersBusyError()));
  return reactor;
}

grpc::ServerUnaryReactor* WeightBrokerServiceImpl::ReportDamage(grpc::CallbackServerContext* grpc_context,
                                                                const v1::ReportDamageRequest* request,
                                                                v1::ReportDamageResponse* response) {
  auto* const reactor = grpc_context->DefaultReactor();
  CallRecord record(context_, RpcMethod::kReportDamage, grpc_context->peer());
  absl::Status status = record.CheckCaller();
  if (status.ok()) {
    record.SetObject(request->fingerprint());
    status = AnswerReport(*request, record.peer(), response);
  }
  reactor->Finish(record.End(status));
  return reactor;
}

grpc::ServerUnaryReactor* WeightBrokerServiceImpl::ReportAttach(grpc::CallbackServerContext* grpc_context,
                                                                const v1::ReportAttachRequest* request,
                                                                v1::ReportAttachResponse* /*response*/) {
  auto* const reactor = grpc_context->DefaultReactor();
  CallRecord record(context_, RpcMethod::kReportAttach, grpc_context->peer());
  absl::Status status = record.CheckCaller();
  if (status.ok()) {
    record.SetObject(request->fingerprint());
    status = TakeReport(*request);
  }
  reactor->Finish(record.End(status));
  return reactor;
}

// Counted and not looked into, but for a time that no attach takes, which a sum would never get over: an engine that
// says what is not so spoils a graph.
absl::Status WeightBrokerServiceImpl::TakeReport(const v1::ReportAttachRequest& request) const {
  OutcomeMetrics& outcomes = context_.metrics->outcomes();
  switch (request.outcome()) {
    case v1::ReportAttachRequest::OUTCOME_ATTACHED:
      RETURN_IF_ERROR(CheckAttachSeconds(request.seconds()));
      outcomes.CountAttach(AttachOutcome::kAttached, "");
      outcomes.ObserveAttach(request.seconds());
      return absl::OkStatus();
    case v1::ReportAttachRequest::OUTCOME_DISK:
      outcomes.CountAttach(AttachOutcome::kDisk, request.reason());
      return absl::OkStatus();
    case v1::ReportAttachRequest::OUTCOME_FAILED:
      outcomes.CountAttach(AttachOutcome::kFailed, request.reason());
      return absl::OkStatus();
    default:
      return MakeError(Reason::kInvalidArgument,
                       absl::StrCat("outcome: ", static_cast<int>(request.outcome()), " is none of 1 to 3"),
                       {{"field", "outcome"}});
  }
}

// What an engine says proves nothing: whoever could have a set put out of service by a word could stop all engines.
absl::Status WeightBrokerServiceImpl::AnswerReport(const v1::ReportDamageRequest& request, const Peer& peer,
                                                   v1::ReportDamageResponse* response) const {
  const WeightSetRef set = context_.registry->Find(request.fingerprint());
  if (set == nullptr || context_.registry->View(set).generation != request.generation()) {
    return MakeError(Reason::kNotResident, "the weight set that is said to be damaged is not resident",
                     {{"fingerprint", Printable(request.fingerprint())}});
  }
  RETURN_IF_ERROR(context_.registry->Look(set, request.rank(), {}).status());
  response->set_scrub_started(context_.scrubs->Report({set, request.rank()}));
  context_.metrics->CountDamageReport(response->scrub_started());
  Log(LogLevel::kWarning, "damage.reported",
      {{"fingerprint", set->fingerprint().hash},
       {"rank", absl::StrCat(request.rank())},
       {"tensor", Printable(request.tensor())},
       {"scrub_started", response->scrub_started() ? "true" : "false"},
       {"uid", absl::StrCat(peer.uid)},
       {"peer_pid", absl::StrCat(peer.pid)}});
  return absl::OkStatus();
}

void WeightBrokerServiceImpl::FillHealth(const HealthFacts::Facts& facts, v1::HealthResponse* response) const {
  const RegistryTotals totals = context_.registry->Totals();
  response->set_status(ServiceStatus(totals, context_.reconciler));
  response->set_version(context_.version);
  response->set_process_id(getpid());
  SetTimestamp(context_.start_time, response->mutable_start_time());
  for (v1::WeightSet& set : context_.registry->List()) *response->add_weight_sets() = std::move(set);
  response->set_reserved_bytes(totals.reserved_bytes);
  response->set_memory_limit_bytes(context_.memory_limit_bytes);
  response->set_available_bytes(facts.available_bytes);
  response->set_lease_count(totals.lease_count);
  response->set_load_count(totals.CountLoads());
  response->set_connection_count(facts.open_connections);
  response->set_host_page_kind(facts.host_page_kind);
  response->set_outlives_broker(context_.outlives_broker);
  for (const ModelRoot& root : context_.resolver->roots()) response->add_model_roots(root.name);
  for (const v1::Device& device : facts.gpus.devices) *response->add_devices() = device;
  response->set_driver_version(facts.gpus.driver_version);
  response->set_gpu_refusal(facts.gpus.refusal);
  for (const v1::HandleKind kind : HandleKindsOf(context_.devices->Served())) response->add_handle_kinds(kind);
  FillDesired(response);
}

void WeightBrokerServiceImpl::FillDesired(v1::HealthResponse* response) const {
  if (context_.reconciler == nullptr) return;
  for (v1::DesiredSet& set : context_.reconciler->DescribeSets()) *response->add_desired_sets() = std::move(set);
  for (v1::DesiredAlias& alias : context_.reconciler->DescribeAliases()) {
    *response->add_desired_aliases() = std::move(alias);
  }
  const absl::Status failure = context_.reconciler->failure();
  if (failure.ok()) return;
  response->mutable_desired_failure()->set_reason(GetErrorDetails(failure).reason);
  response->mutable_desired_failure()->set_message(std::string(failure.message()));
}

}  // namespace weightbroker
