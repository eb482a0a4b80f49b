#include "weightbroker/status.h"

#include <cstdio>
#include <cstdlib>
#include <iterator>

#include "client/src/status_conversion.h"
#include "common/base/error.h"

namespace weightbroker {
namespace {

constexpr const char* kCodeNames[] = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};

static_assert(static_cast<int>(StatusCode::kInvalidArgument) == static_cast<int>(absl::StatusCode::kInvalidArgument));
static_assert(static_cast<int>(StatusCode::kUnavailable) == static_cast<int>(absl::StatusCode::kUnavailable));
static_assert(static_cast<int>(StatusCode::kUnauthenticated) == static_cast<int>(absl::StatusCode::kUnauthenticated));

}  // namespace

const char* StatusCodeName(StatusCode code) {
  const auto index = static_cast<size_t>(code);
  return index < std::size(kCodeNames) ? kCodeNames[index] : "UNKNOWN";
}

std::string Status::ToString() const {
  if (ok()) return "OK";
  return std::string(StatusCodeName(code_)) + ": " + message_ + " [" + reason_ + "]";
}

namespace internal {

void DieOfBadAccess(const Status& status) {
  fprintf(stderr, "weightbroker: the value of a Result was used that has none: %s\n", status.ToString().c_str());
  abort();
}

}  // namespace internal

namespace client {

Status ToPublic(const absl::Status& status) {
  if (status.ok()) return Status();
  ErrorDetails details = GetErrorDetails(status);
  std::string reason = details.reason.empty() ? std::string(ReasonName(Reason::kProtocolError)) : details.reason;
  return Status(static_cast<StatusCode>(status.code()), std::move(reason), std::string(status.message()),
                std::move(details.metadata));
}

}  // namespace client
}  // namespace weightbroker
