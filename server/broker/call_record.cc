#include "server/broker/call_record.h"

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"
#include "server/broker/audit.h"

namespace weightbroker {
namespace {

// Of the message as gRPC sends it. The details take up to 2,800 bytes.
constexpr size_t kMaxEncodedMessageBytes = 1200;

// Percent-encoding takes three bytes for each that is not printable ASCII, and for '%'.
size_t EncodedSize(char c) { return c >= ' ' && c <= '~' && c != '%' ? 1 : 3; }

std::string CutToEncodedSize(const std::string& message) {
  size_t encoded = 0;
  for (size_t i = 0; i < message.size(); ++i) {
    encoded += EncodedSize(message[i]);
    if (encoded > kMaxEncodedMessageBytes) return CutUtf8WithCount(message, i);
  }
  return message;
}

Operation OperationOf(RpcMethod method) {
  switch (method) {
    case RpcMethod::kRegister:
      return Operation::kRegister;
    case RpcMethod::kAllocateSlabs:
    case RpcMethod::kCommit:
      return Operation::kPublish;
    case RpcMethod::kUnregister:
    case RpcMethod::kScrub:
    case RpcMethod::kSetAlias:
    case RpcMethod::kDeleteAlias:
      return Operation::kAdminister;
    default:
      return Operation::kRead;
  }
}

// Methods whose success is audited at their end; of Register and Export that is when they have got what they wanted.
bool IsAuditedAtEnd(RpcMethod method) {
  return OperationOf(method) == Operation::kAdminister || method == RpcMethod::kCommit ||
         method == RpcMethod::kReportDamage;
}

std::string MessageToSend(const absl::Status& status) { return CutToEncodedSize(ToUtf8(ToStd(status.message()))); }

void LogRefusal(RpcMethod method, const std::optional<Peer>& peer, const absl::Status& status) {
  LogFields fields = {{"method", std::string(RpcMethodName(method))}, {"reason", GetErrorDetails(status).reason}};
  if (peer.has_value()) {
    fields.emplace_back("uid", absl::StrCat(peer->uid));
    fields.emplace_back("peer_pid", absl::StrCat(peer->pid));
  }
  fields.emplace_back("message", MessageToSend(status));
  Log(LogLevel::kWarning, "call.refused", fields);
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), MessageToSend(status), SerializeRpcStatus(status));
}

CallRecord::CallRecord(const ServiceContext& context, RpcMethod method, const std::string& grpc_peer)
    : context_(context),
      method_(method),
      start_(context.clock->SteadyNow()),
      peer_(context.find_peer(grpc_peer)),
      limit_(peer_.has_value() && context.limits != nullptr ? context.limits->Begin(peer_->uid) : ClientLimits::Hold()),
      live_(context.live_calls->Begin()) {
  context_.metrics->outcomes().CountStarted(static_cast<size_t>(method));
}

absl::Status CallRecord::CheckCaller(std::optional<Operation> operation) const {
  if (!peer_.has_value()) {
    return MakeError(Reason::kAccessDenied,
                     "the caller of this connection is not known; connect over the service's socket");
  }
  RETURN_IF_ERROR(CheckOperation(context_.access, operation.value_or(OperationOf(method_)), *peer_));
  if (!limit_.status().ok()) context_.metrics->CountLimitHit("max_calls_per_uid");
  return limit_.status();
}

absl::Status CallRecord::CheckInTime() const {
  const auto age = context_.clock->SteadyNow() - start_;
  if (context_.call_deadline.count() == 0 || age <= context_.call_deadline) return absl::OkStatus();
  context_.metrics->CountLimitHit("call_deadline");
  return MakeError(Reason::kDeadlineExceeded,
                   absl::StrCat("the call waited for its turn for ", std::chrono::duration<double>(age).count(),
                                " s, longer than calls may (--call_deadline): the service is overloaded; try again"),
                   {{"limit", "call_deadline"}});
}

void CallRecord::Watch(const std::shared_ptr<WatchedStream>& stream) const {
  if (context_.stream_watch != nullptr) context_.stream_watch->Add(stream);
}

void CallRecord::AuditDone(const std::string& object) const {
  Audit({RpcMethodName(method_), peer_, object, absl::OkStatus()});
}

void CallRecord::ObserveDuration() {
  if (observed_) return;
  observed_ = true;
  context_.metrics->ObserveRpcDuration(method_,
                                       std::chrono::duration<double>(context_.clock->SteadyNow() - start_).count());
}

grpc::Status CallRecord::End(const absl::Status& status) {
  ObserveDuration();
  context_.metrics->CountRpc(method_, status.code());
  const std::string reason = status.ok() ? "" : GetErrorDetails(status).reason;
  if (status.ok() && IsAuditedAtEnd(method_)) AuditDone(object_);
  if (!reason.empty()) {
    context_.metrics->CountRefusal(reason);
    if (const auto left_out = TakeRefusalTurn(); left_out.has_value()) {
      Audit({RpcMethodName(method_), peer_, object_, status}, *left_out);
      LogRefusal(method_, peer_, status);
    }
  }
  return ToGrpcStatus(status);
}

}  // namespace weightbroker
