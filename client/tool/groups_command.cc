#include "client/tool/groups_command.h"

#include <google/protobuf/util/time_util.h>

#include <cstdio>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/src/connection.h"
#include "client/tool/format.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"
#include "weightbroker/v1/weight_broker_group_service.grpc.pb.h"

namespace weightbroker::tool {
namespace {

using client::Connection;
using client::DeadlineIn;
using google::protobuf::RepeatedPtrField;
using google::protobuf::util::TimeUtil;

constexpr size_t kShortFingerprint = 12;

std::string Milliseconds(const google::protobuf::Duration& duration) {
  return absl::StrCat(TimeUtil::DurationToMilliseconds(duration), " ms");
}

void AddRows(const v1::EngineGroup& group, std::vector<std::vector<std::string>>* rows) {
  const v1::TakeoverCounts& counts = group.takeovers();
  const std::string takeovers =
      absl::StrCat(counts.died(), " died, ", counts.hung(), " hung, ", counts.left(), " left");
  const std::string fingerprint = group.fingerprint().substr(0, kShortFingerprint);
  const std::string timeout = Milliseconds(group.heartbeat_timeout());
  const std::string epoch = absl::StrCat(group.epoch());
  if (group.members().empty()) {
    rows->push_back({group.name(), fingerprint, timeout, epoch, takeovers, "none", "", ""});
  }
  for (const v1::GroupMember& member : group.members()) {
    const std::string role = WithoutPrefix(v1::GroupMember::Role_Name(member.role()), "ROLE_");
    rows->push_back({group.name(), fingerprint, timeout, epoch, takeovers, role, absl::StrCat(member.process_id()),
                     absl::StrCat(Milliseconds(member.heartbeat_age()), member.hung() ? " (hung)" : "")});
  }
}

void PrintGroups(const RepeatedPtrField<v1::EngineGroup>& groups) {
  if (groups.empty()) {
    printf("no engine groups\n");
    return;
  }
  std::vector<std::vector<std::string>> rows = {
      {"GROUP", "FINGERPRINT", "TIMEOUT", "EPOCH", "TAKEOVERS", "ROLE", "PID", "HEARTBEAT"}};
  for (const v1::EngineGroup& group : groups) AddRows(group, &rows);
  printf("%s", FormatTable(rows).c_str());
  for (const v1::EngineGroup& group : groups) {
    if (!group.page_error().empty()) printf("%s: %s\n", group.name().c_str(), group.page_error().c_str());
  }
}

absl::StatusOr<v1::ListGroupsResponse> List(const ServiceFlags& service) {
  ASSIGN_OR_RETURN(const std::shared_ptr<Connection> connection, Connect(service));
  const auto stub = v1::WeightBrokerGroupService::NewStub(connection->channel());
  v1::ListGroupsResponse response;
  RETURN_IF_ERROR(connection->Call(DeadlineIn(service.timeout), [&](grpc::ClientContext& context) {
    return stub->ListGroups(&context, {}, &response);
  }));
  return response;
}

absl::StatusOr<v1::RemoveGroupResponse> Remove(const ServiceFlags& service, const GroupsFlags& flags) {
  ASSIGN_OR_RETURN(const std::shared_ptr<Connection> connection, Connect(service));
  const auto stub = v1::WeightBrokerGroupService::NewStub(connection->channel());
  v1::RemoveGroupRequest request;
  request.set_name(flags.remove);
  request.set_force(flags.force);
  v1::RemoveGroupResponse response;
  RETURN_IF_ERROR(connection->CallOnce(DeadlineIn(service.timeout), [&](grpc::ClientContext& context) {
    return stub->RemoveGroup(&context, request, &response);
  }));
  return response;
}

}  // namespace

ExitCode RunGroups(const ServiceFlags& service, const GroupsFlags& flags) {
  if (flags.remove.empty()) {
    const auto response = List(service);
    if (!response.ok()) return PrintError(response.status(), service.json);
    if (service.json) {
      PrintJson(*response);
    } else {
      PrintGroups(response->groups());
    }
    return kDone;
  }
  const auto response = Remove(service, flags);
  if (!response.ok()) return PrintError(response.status(), service.json);
  if (service.json) {
    PrintJson(*response);
  } else {
    printf("removed: %s, epoch %lld, %s\n", response->group().name().c_str(),
           static_cast<long long>(response->group().epoch()),
           FormatCount(response->group().members_size(), "member").c_str());
  }
  return kDone;
}

}  // namespace weightbroker::tool
