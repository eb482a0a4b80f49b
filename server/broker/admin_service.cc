#include "server/broker/admin_service.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "server/broker/alias_calls.h"
#include "server/broker/call_record.h"
#include "server/broker/scrub_call.h"

namespace weightbroker {

grpc::ServerUnaryReactor* AdminServiceImpl::ListWeightSets(grpc::CallbackServerContext* grpc_context,
                                                           const v1::ListWeightSetsRequest*,
                                                           v1::ListWeightSetsResponse* response) {
  auto* const reactor = grpc_context->DefaultReactor();
  CallRecord record(context_, RpcMethod::kListWeightSets, grpc_context->peer());
  absl::Status status = record.CheckCaller();
  if (status.ok()) {
    for (v1::WeightSet& set : context_.registry->List()) *response->add_weight_sets() = std::move(set);
    for (const KeptAlias& alias : context_.registry->Aliases()) WriteAlias(alias, response->add_aliases());
    status = context_.registry->CheckServing();
  }
  reactor->Finish(record.End(status));
  return reactor;
}

grpc::ServerUnaryReactor* AdminServiceImpl::Unregister(grpc::CallbackServerContext* grpc_context,
                                                       const v1::UnregisterRequest* request,
                                                       v1::UnregisterResponse* response) {
  auto* const reactor = grpc_context->DefaultReactor();
  const auto record = std::make_shared<CallRecord>(context_, RpcMethod::kUnregister, grpc_context->peer());
  if (const absl::Status status = record->CheckCaller(); !status.ok()) {
    reactor->Finish(record->End(status));
    return reactor;
  }
  const bool taken = context_.workers->TrySubmit([this, reactor, record, request, response] {
    record->SetObject(request->fingerprint());
    absl::Status status = record->CheckInTime();
    if (status.ok()) status = AnswerUnregister(*request, response);
    if (status.ok()) record->SetObject(response->weight_set().fingerprint());
    if (status.ok()) {
      Log(LogLevel::kInfo, "unregister",
          {{"fingerprint", response->weight_set().fingerprint()},
           {"ended_leases", absl::StrCat(response->ended_lease_count())},
           {"uid", absl::StrCat(record->peer().uid)},
           {"peer_pid", absl::StrCat(record->peer().pid)}});
    }
    reactor->Finish(record->End(status));
  });
  if (!taken) reactor->Finish(record->End(WorkersBusyError()));
  return reactor;
}

grpc::ServerUnaryReactor* AdminServiceImpl::SetAlias(grpc::CallbackServerContext* grpc_context,
                                                     const v1::SetAliasRequest* request,
                                                     v1::SetAliasResponse* response) {
  auto* const reactor = grpc_context->DefaultReactor();
  const auto record = std::make_shared<CallRecord>(context_, RpcMethod::kSetAlias, grpc_context->peer());
  if (const absl::Status status = record->CheckCaller(); !status.ok()) {
    reactor->Finish(record->End(status));
    return reactor;
  }
  const bool taken = context_.workers->TrySubmit([this, reactor, record, request, response] {
    record->SetObject(absl::StrCat(request->alias(), " ", request->fingerprint()));
    absl::Status status = record->CheckInTime();
    if (status.ok()) status = AnswerSetAlias(context_, *record, *request, response);
    reactor->Finish(record->End(status));
  });
  if (!taken) reactor->Finish(record->End(WorkersBusyError()));
  return reactor;
}

grpc::ServerUnaryReactor* AdminServiceImpl::DeleteAlias(grpc::CallbackServerContext* grpc_context,
                                                        const v1::DeleteAliasRequest* request,
                                                        v1::DeleteAliasResponse* response) {
  auto* const reactor = grpc_context->DefaultReactor();
  const auto record = std::make_shared<CallRecord>(context_, RpcMethod::kDeleteAlias, grpc_context->peer());
  if (const absl::Status status = record->CheckCaller(); !status.ok()) {
    reactor->Finish(record->End(status));
    return reactor;
  }
  const bool taken = context_.workers->TrySubmit([this, reactor, record, request, response] {
    record->SetObject(request->alias());
    absl::Status status = record->CheckInTime();
    if (status.ok()) status = AnswerDeleteAlias(context_, *record, *request, response);
    reactor->Finish(record->End(status));
  });
  if (!taken) reactor->Finish(record->End(WorkersBusyError()));
  return reactor;
}

grpc::ServerWriteReactor<v1::ScrubResponse>* AdminServiceImpl::Scrub(grpc::CallbackServerContext* grpc_context,
                                                                     const v1::ScrubRequest* request) {
  const auto call =
      std::make_shared<ScrubCall>(context_, CallRecord(context_, RpcMethod::kScrub, grpc_context->peer()), *request);
  auto* const reactor = call->Attach(grpc_context);
  call->Start();
  return reactor;
}

absl::Status AdminServiceImpl::AnswerUnregister(const v1::UnregisterRequest& request,
                                                v1::UnregisterResponse* response) const {
  const absl::StatusOr<WeightSetRef> found = context_.registry->FindByPrefix(request.fingerprint());
  RETURN_IF_ERROR(context_.registry->CheckServing());
  ASSIGN_OR_RETURN(const WeightSetRef set, found);
  if (request.force()) {
    const absl::Status cause = MakeError(Reason::kCancelled, "an operator unregistered the weight set by force");
    context_.loads->Cancel(set, cause);
    context_.publications->Cancel(set, cause);
  }
  ASSIGN_OR_RETURN(Registry::Released released,
                   request.force() ? context_.registry->ReleaseByForce(set) : context_.registry->Release(set));
  *response->mutable_weight_set() = std::move(released.set);
  response->set_ended_lease_count(released.ended_leases);
  return absl::OkStatus();
}

}  // namespace weightbroker
