// WeightBrokerGroupService over gRPC's callback API. Thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "server/broker/engine_groups.h"
#include "server/broker/service_context.h"
#include "weightbroker/v1/weight_broker_group_service.grpc.pb.h"

namespace weightbroker {

class GroupServiceImpl final : public v1::WeightBrokerGroupService::CallbackService {
 public:
  // Both must outlive the service.
  GroupServiceImpl(const ServiceContext& context, EngineGroups& groups) : context_(context), groups_(groups) {}

  // What waits for the keeper, a worker does.
  grpc::ServerUnaryReactor* JoinGroup(grpc::CallbackServerContext* grpc_context, const v1::JoinGroupRequest* request,
                                      v1::JoinGroupResponse* response) override;
  grpc::ServerUnaryReactor* ListGroups(grpc::CallbackServerContext* grpc_context, const v1::ListGroupsRequest* request,
                                       v1::ListGroupsResponse* response) override;
  grpc::ServerUnaryReactor* RemoveGroup(grpc::CallbackServerContext* grpc_context,
                                        const v1::RemoveGroupRequest* request,
                                        v1::RemoveGroupResponse* response) override;

 private:
  absl::Status AnswerJoin(const v1::JoinGroupRequest& request, const Peer& peer, v1::JoinGroupResponse* response);
  absl::Status AnswerRemove(const v1::RemoveGroupRequest& request, const Peer& peer, v1::RemoveGroupResponse* response);

  const ServiceContext& context_;
  EngineGroups& groups_;
};

}  // namespace weightbroker
