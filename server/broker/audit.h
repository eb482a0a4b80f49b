// One line in the log for every call that changes something, hands something out, or was refused: who, what, and what
// came of it. Never a ticket, a token or a handle.
//
//   Audit({.method = "Export", .peer = peer, .object = fingerprint, .outcome = absl::OkStatus()});
//
// Refusals are written down at most 20 times a second, and the next line says how many were left out: whoever floods
// the service must not flood the log. What was done is all there. Thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "server/endpoint/peer.h"

namespace weightbroker {

struct AuditEvent {
  std::string_view method;
  const std::optional<Peer>& peer;
  const std::string& object;  // a fingerprint, or as much of it as the caller said; may be empty
  const absl::Status& outcome;
};

// Whether the lines of a refusal may be written now, and then how many refusals before it were left out.
std::optional<int64_t> TakeRefusalTurn();

void Audit(const AuditEvent& event, int64_t refusals_left_out = 0);

}  // namespace weightbroker
