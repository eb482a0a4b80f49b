#include "server/broker/group_service.h"

#include <memory>
#include <utility>

#include "common/base/status_macros.h"
#include "common/group/page.h"
#include "server/broker/call_record.h"
#include "server/broker/timestamp.h"

namespace weightbroker {
namespace {

// Of tickets that end with no lease: they are revoked by their time alone.
constexpr int64_t kNoLease = 0;

}  // namespace

grpc::ServerUnaryReactor* GroupServiceImpl::JoinGroup(grpc::CallbackServerContext* grpc_context,
                                                      const v1::JoinGroupRequest* request,
                                                      v1::JoinGroupResponse* response) {
  auto* const reactor = grpc_context->DefaultReactor();
  const auto record = std::make_shared<CallRecord>(context_, RpcMethod::kJoinGroup, grpc_context->peer());
  if (const absl::Status status = record->CheckCaller(); !status.ok()) {
    reactor->Finish(record->End(status));
    return reactor;
  }
  record->SetObject(request->name());
  const bool taken = context_.workers->TrySubmit([this, reactor, record, request, response] {
    reactor->Finish(record->End(AnswerJoin(*request, record->peer(), response)));
  });
  if (!taken) reactor->Finish(record->End(WorkersBusyError()));
  return reactor;
}

absl::Status GroupServiceImpl::AnswerJoin(const v1::JoinGroupRequest& request, const Peer& peer,
                                          v1::JoinGroupResponse* response) {
  RETURN_IF_ERROR(context_.registry->CheckServing());
  ASSIGN_OR_RETURN(EngineGroups::Joined joined, groups_.Join(request, peer));
  const Ticket ticket = context_.tickets->Issue({.uid = peer.uid, .lease_id = kNoLease, .fds = std::move(joined.page)},
                                                context_.ticket_lifetime);
  response->set_ticket(ticket.data(), ticket.size());
  SetTimestamp(context_.clock->WallNow() + context_.ticket_lifetime, response->mutable_ticket_expire_time());
  response->set_page_bytes(static_cast<int64_t>(group::kPageBytes));
  *response->mutable_group() = std::move(joined.group);
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* GroupServiceImpl::ListGroups(grpc::CallbackServerContext* grpc_context,
                                                       const v1::ListGroupsRequest*, v1::ListGroupsResponse* response) {
  auto* const reactor = grpc_context->DefaultReactor();
  CallRecord record(context_, RpcMethod::kListGroups, grpc_context->peer());
  const absl::Status status = record.CheckCaller();
  if (status.ok()) {
    for (v1::EngineGroup& group : groups_.List(record.peer())) *response->add_groups() = std::move(group);
  }
  reactor->Finish(record.End(status));
  return reactor;
}

grpc::ServerUnaryReactor* GroupServiceImpl::RemoveGroup(grpc::CallbackServerContext* grpc_context,
                                                        const v1::RemoveGroupRequest* request,
                                                        v1::RemoveGroupResponse* response) {
  auto* const reactor = grpc_context->DefaultReactor();
  const auto record = std::make_shared<CallRecord>(context_, RpcMethod::kRemoveGroup, grpc_context->peer());
  if (const absl::Status status = record->CheckCaller(); !status.ok()) {
    reactor->Finish(record->End(status));
    return reactor;
  }
  record->SetObject(request->name());
  const bool taken = context_.workers->TrySubmit([this, reactor, record, request, response] {
    reactor->Finish(record->End(AnswerRemove(*request, record->peer(), response)));
  });
  if (!taken) reactor->Finish(record->End(WorkersBusyError()));
  return reactor;
}

absl::Status GroupServiceImpl::AnswerRemove(const v1::RemoveGroupRequest& request, const Peer& peer,
                                            v1::RemoveGroupResponse* response) {
  ASSIGN_OR_RETURN(*response->mutable_group(), groups_.Remove(request, peer));
  return absl::OkStatus();
}

}  // namespace weightbroker
