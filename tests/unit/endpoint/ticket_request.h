// The first bytes of connections, written out by hand so that a slip in redeem.h shows.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace weightbroker::testing {

// With one setting, so that all of it is seen to be waited for.
inline constexpr std::string_view kHttp2Preface("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\6\4\0\0\0\0\0\0\2\0\0\0\0", 39);

inline std::string TicketRequest(std::string_view ticket, uint32_t version = 1) {
  std::string request("\x89WBFD\r\n\x1a", 8);
  for (const uint32_t number : {version, static_cast<uint32_t>(ticket.size())}) {
    for (int shift = 0; shift < 32; shift += 8) request.push_back(static_cast<char>(number >> shift));
  }
  return request + std::string(ticket);
}

}  // namespace weightbroker::testing
