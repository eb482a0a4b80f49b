// What every subcommand ends with: a result on stdout, as a table or as JSON, or an error on stderr (and as JSON on
// stdout), and the exit code.
#pragma once

#include <google/protobuf/message.h>

#include <string>

#include "absl/status/status.h"
#include "weightbroker/status.h"

namespace weightbroker::tool {

enum ExitCode { kDone = 0, kNotReady = 1, kUsage = 2, kRefused = 3, kUnavailable = 4 };

// kUnavailable if no service answered, or not now; else kRefused.
ExitCode ExitCodeFor(const absl::Status& status);

// Message, reason, metadata, and what to do. Returns ExitCodeFor(status).
ExitCode PrintError(const absl::Status& status, bool json);
ExitCode PrintError(const Status& status, bool json);

// Protobuf's JSON mapping on one line, fields named as in the .proto files. Those with their default value are there,
// too, but for messages that are absent.
void PrintJson(const google::protobuf::Message& message);
// The same with one more key, of what the tool knows besides.
void PrintJsonWith(const google::protobuf::Message& message, const std::string& key, const std::string& value);

}  // namespace weightbroker::tool
