// Errors that say what, where, found, allowed and what to do, for people and for programs.
//
//   return MakeError(Reason::kCheckpointTruncated,
//                    absl::StrCat(file, ": the header ends at byte ", end, " but the file has ", size,
//                                 ": the file is truncated; download it again"),
//                    {{"file", file}, {"expected_bytes", absl::StrCat(end)}, {"found_bytes", absl::StrCat(size)}});
//
// The status carries one ErrorInfo as a payload, so that the broker can put it into the RPC's details as it is, and a
// loader can send it to the broker. Thread-safe: all functions are pure.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "common/base/reason.h"

namespace weightbroker {

inline constexpr char kErrorInfoTypeUrl[] = "type.googleapis.com/google.rpc.ErrorInfo";
inline constexpr char kErrorDomain[] = "weightbroker";

// What a program reads from an error. The same values as the message names.
struct ErrorDetails {
  std::string reason;  // UPPER_SNAKE; empty if the status carries none
  std::map<std::string, std::string> metadata;
};

// A status with the reason's canonical code, `message`, and ErrorInfo{reason, metadata}.
absl::Status MakeError(Reason reason, const std::string& message,
                       const std::map<std::string, std::string>& metadata = {});

// The same, with "<what>: <strerror(error_number)>" as message and the errno's name as metadata.
absl::Status SystemError(const std::string& what, int error_number);

// The details of a status made by MakeError, also when it came over the wire. Empty for any other.
ErrorDetails GetErrorDetails(const absl::Status& status);

// Whether `status` was made with `reason`.
bool HasReason(const absl::Status& status, Reason reason);

// Serializes as google.rpc.Status (code, message, details) and back. Message and details together are cut to stay
// under 4 KiB: past about 8 KiB of trailing metadata a default gRPC client sees RESOURCE_EXHAUSTED instead. What is cut
// is said with a count. Bytes that are not UTF-8 become \xNN: a strict client would otherwise lose the whole of it.
// ParseRpcStatus gives INTERNAL for bytes that are not such a message.
std::string SerializeRpcStatus(const absl::Status& status);
absl::Status ParseRpcStatus(std::string_view bytes);

}  // namespace weightbroker
