#include "client/src/attach_report.h"

#include <chrono>

#include "common/base/error.h"

namespace weightbroker::client {
namespace {

constexpr std::chrono::milliseconds kPatience(500);

// Whether there is a service to tell.
bool IsThere(const absl::Status& status) {
  return !HasReason(status, Reason::kServiceUnavailable) && !HasReason(status, Reason::kServiceNotStarted) &&
         !HasReason(status, Reason::kDeadlineExceeded);
}

}  // namespace

void ReportNotAttached(const Connection& connection, v1::ReportAttachRequest::Outcome outcome,
                       const absl::Status& why_not) {
  if (!IsThere(why_not)) return;
  v1::ReportAttachRequest request;
  request.set_outcome(outcome);
  request.set_reason(GetErrorDetails(why_not).reason);
  v1::ReportAttachResponse response;
  connection
      .CallOnce(
          DeadlineIn(kPatience),
          [&](grpc::ClientContext& context) { return connection.service().ReportAttach(&context, request, &response); })
      .IgnoreError();
}

}  // namespace weightbroker::client
