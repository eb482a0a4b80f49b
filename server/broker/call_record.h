// What is known and counted of one call: who makes it, how long it takes, how it ends.
//
//   CallRecord record(context, RpcMethod::kHealth, grpc_context->peer());
//   RETURN_IF_ERROR(record.CheckCaller());
//   ...
//   reactor->Finish(record.End(status));       // metrics, one log line if it was refused, and gRPC's form of the
//   status
//
// As long as it lives the call is one that a broker which ends waits for. Not thread-safe.
#pragma once

#include <grpcpp/support/status.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "server/broker/live_calls.h"
#include "server/broker/metrics.h"
#include "server/broker/service_context.h"
#include "server/broker/stream_watch.h"

namespace weightbroker {

// gRPC's form of a status: code, message, and google.rpc.Status with the ErrorInfo as details. The message is cut so
// that all of it stays under 4 KiB on the wire, where bytes that are not printable ASCII take three.
grpc::Status ToGrpcStatus(const absl::Status& status);

class CallRecord {
 public:
  // `context` must outlive the record. `grpc_peer` is ServerContext::peer().
  CallRecord(const ServiceContext& context, RpcMethod method, const std::string& grpc_peer);

  // ACCESS_DENIED unless the call came over a connection that the endpoint accepted, of somebody who may do what the
  // method does, or `operation` if that is something else; TOO_MANY_REQUESTS if that user has too many calls under way.
  absl::Status CheckCaller(std::optional<Operation> operation = std::nullopt) const;

  // DEADLINE_EXCEEDED if the call has waited for its turn for longer than calls may.
  absl::Status CheckInTime() const;

  // Has the stream cut off if its caller does not read.
  void Watch(const std::shared_ptr<WatchedStream>& stream) const;

  // What the call is about, for its audit line.
  void SetObject(const std::string& object) { object_ = object; }

  // The audit line of a call that has got what it asked for, though it goes on.
  void AuditDone(const std::string& object) const;

  // Valid once CheckCaller has said ok.
  const Peer& peer() const { return *peer_; }

  // Takes the time from the start to the first call of this as the call's duration.
  void ObserveDuration();

  // Counts the end, and logs a refusal.
  grpc::Status End(const absl::Status& status);

 private:
  const ServiceContext& context_;
  const RpcMethod method_;
  const std::chrono::steady_clock::time_point start_;
  const std::optional<Peer> peer_;
  ClientLimits::Hold limit_;
  LiveCalls::Hold live_;
  std::string object_;
  bool observed_ = false;
};

}  // namespace weightbroker
