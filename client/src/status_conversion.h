// From our own errors to those that the public headers show.
#pragma once

#include "absl/status/status.h"
#include "weightbroker/status.h"

namespace weightbroker::client {

// The same code, message, reason and metadata. An error without an ErrorInfo becomes PROTOCOL_ERROR: ours all carry
// one.
Status ToPublic(const absl::Status& status);

}  // namespace weightbroker::client
