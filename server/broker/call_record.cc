#include "server/broker/call_record.h"

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/quote.h"
#include "common/base/strings.h"

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

std::string MessageToSend(const absl::Status& status) { return CutToEncodedSize(ToUtf8(ToStd(status.message()))); }

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
      live_(context.live_calls->Begin()) {
  context_.metrics->outcomes().CountStarted(static_cast<size_t>(method));
}

absl::Status CallRecord::CheckCaller() const {
  if (peer_.has_value()) return absl::OkStatus();
  return MakeError(Reason::kAccessDenied,
                   "the caller of this connection is not known; connect over the service's socket");
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
  if (!reason.empty()) {
    context_.metrics->CountRefusal(reason);
    LogFields fields = {{"method", std::string(RpcMethodName(method_))}, {"reason", reason}};
    if (peer_.has_value()) {
      fields.emplace_back("uid", absl::StrCat(peer_->uid));
      fields.emplace_back("peer_pid", absl::StrCat(peer_->pid));
    }
    fields.emplace_back("message", MessageToSend(status));
    Log(LogLevel::kWarning, "call.refused", fields);
  }
  return ToGrpcStatus(status);
}

}  // namespace weightbroker
