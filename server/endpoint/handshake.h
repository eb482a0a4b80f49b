// Reads the first bytes of a connection: is it HTTP/2, a ticket, or neither?
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace weightbroker {

// The longest that has to be seen: the HTTP/2 preface and a SETTINGS frame of 64 settings, several times as many as
// there are. A ticket request is shorter.
inline constexpr size_t kMaxHandshakeBytes = 24 + 9 + 64 * 6;

struct Handshake {
  enum class Kind {
    kIncomplete,  // so far it could be either, or the rest of it is not there yet
    kHttp2,       // the whole connection preface is there: its 24 bytes and the client's SETTINGS
    kTicket,      // a whole ticket request is there
    kMalformed,   // the ticket magic, then something that is not understood: `error`
    kGarbage,     // neither
  };
  Kind kind = Kind::kIncomplete;
  std::string ticket = {};  // kTicket only
  absl::Status error = {};  // kMalformed only
};

// `bytes` are the first bytes of the connection that have arrived, at most kMaxHandshakeBytes of them.
Handshake ReadHandshake(std::string_view bytes);

}  // namespace weightbroker
