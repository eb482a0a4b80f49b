#include "weightbroker/engine_group.h"

#include <algorithm>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/src/connection.h"
#include "client/src/redeem_ticket.h"
#include "client/src/status_conversion.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/group/member.h"
#include "weightbroker/v1/weight_broker_group_service.grpc.pb.h"

namespace weightbroker {
namespace client {

class GroupMemberState {
 public:
  explicit GroupMemberState(std::unique_ptr<group::GroupMember> member) : member_(std::move(member)) {}
  group::GroupMember& member() { return *member_; }

 private:
  const std::unique_ptr<group::GroupMember> member_;
};

namespace {

// A wait that is longer than this is one without end.
constexpr std::chrono::milliseconds kLongestWait = std::chrono::hours(24 * 365);

v1::JoinGroupRequest RequestFor(const GroupOptions& options) {
  v1::JoinGroupRequest request;
  request.set_name(options.name);
  request.set_fingerprint(options.fingerprint);
  if (const int64_t timeout_ms = options.heartbeat_timeout.count(); timeout_ms != 0) {
    request.mutable_heartbeat_timeout()->set_seconds(timeout_ms / 1000);
    request.mutable_heartbeat_timeout()->set_nanos(static_cast<int32_t>(timeout_ms % 1000 * 1'000'000));
  }
  if (options.allows_group) request.set_allowed_gid(options.allowed_group);
  return request;
}

absl::StatusOr<group::GroupPage> FetchPage(const Connection& connection, const GroupOptions& options,
                                           Deadline deadline) {
  const v1::JoinGroupRequest request = RequestFor(options);
  const auto stub = v1::WeightBrokerGroupService::NewStub(connection.channel());
  v1::JoinGroupResponse response;
  RETURN_IF_ERROR(connection.Call(
      deadline, [&](grpc::ClientContext& context) { return stub->JoinGroup(&context, request, &response); }));
  ASSIGN_OR_RETURN(const auto fds, RedeemTicket(connection.socket_path(), response.ticket(), /*fd_count=*/1, deadline));
  ASSIGN_OR_RETURN(group::GroupPage page, group::GroupPage::Map(fds.front().get()));
  if (page.facts().fingerprint == options.fingerprint) return page;
  return group::PageError("it is of other weights than the service says of it");
}

// A broker that ends between the two has its ticket end with it.
absl::StatusOr<std::unique_ptr<group::GroupMember>> JoinGroup(const GroupOptions& options) {
  const Deadline deadline = DeadlineIn(options.deadline);
  ASSIGN_OR_RETURN(const auto connection, Connection::Open({.socket_path = options.socket_path}));
  Attempts attempts(*connection, deadline);
  while (true) {
    RETURN_IF_ERROR(attempts.Begin());
    auto page = FetchPage(*connection, options, deadline);
    if (page.ok()) return group::GroupMember::Join(*std::move(page), {.beats_itself = options.beats_itself});
    if (!attempts.ShallTryAgain(page.status())) return page.status();
  }
}

}  // namespace
}  // namespace client

Result<EngineGroupMember> EngineGroupMember::Join(const GroupOptions& options) {
  auto member = client::JoinGroup(options);
  if (!member.ok()) return client::ToPublic(member.status());
  return EngineGroupMember(std::make_unique<client::GroupMemberState>(*std::move(member)));
}

EngineGroupMember::EngineGroupMember(std::unique_ptr<client::GroupMemberState> state) : state_(std::move(state)) {}

EngineGroupMember::EngineGroupMember(EngineGroupMember&&) noexcept = default;
EngineGroupMember& EngineGroupMember::operator=(EngineGroupMember&&) noexcept = default;
EngineGroupMember::~EngineGroupMember() = default;

bool EngineGroupMember::IsActive(uint64_t epoch) const { return state_->member().IsActive(epoch); }

GroupRole EngineGroupMember::role() const {
  const group::Standing standing = state_->member().standing();
  if (!standing.status.ok()) return GroupRole::kLeft;
  switch (standing.role) {
    case group::MemberRole::kActive:
      return GroupRole::kActive;
    case group::MemberRole::kSuperseded:
      return GroupRole::kSuperseded;
    case group::MemberRole::kStandby:
      break;
  }
  return GroupRole::kStandby;
}

uint64_t EngineGroupMember::epoch() const { return state_->member().standing().epoch; }

Status EngineGroupMember::status() const { return client::ToPublic(state_->member().standing().status); }

Result<uint64_t> EngineGroupMember::WaitUntilActive(std::chrono::milliseconds timeout) const {
  const auto deadline = std::chrono::steady_clock::now() + std::min(timeout, client::kLongestWait);
  const absl::StatusOr<uint64_t> epoch = state_->member().WaitUntilActive(deadline);
  if (!epoch.ok()) return client::ToPublic(epoch.status());
  return *epoch;
}

int EngineGroupMember::event_fd() const { return state_->member().event_fd(); }

void EngineGroupMember::StepDown() { state_->member().StepDown(); }

Status EngineGroupMember::Rejoin() { return client::ToPublic(state_->member().Rejoin()); }

void EngineGroupMember::Leave() { state_->member().Leave(); }

void EngineGroupMember::Beat() { state_->member().Beat(); }

std::chrono::nanoseconds EngineGroupMember::heartbeat_timeout() const {
  return state_->member().page().facts().heartbeat_timeout;
}

}  // namespace weightbroker
