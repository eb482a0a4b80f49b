#include "server/endpoint/handshake.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "client/include/weightbroker/redeem.h"
#include "common/base/error.h"

namespace weightbroker {
namespace {

namespace protocol = ticket_protocol;

constexpr std::string_view kHttp2Preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
static_assert(kHttp2Preface.size() == 24);
static_assert(kMaxHandshakeBytes >= protocol::kRequestHeaderBytes + protocol::kMaxTicketBytes);
constexpr size_t kFrameHeaderBytes = 9;
constexpr unsigned char kSettingsFrame = 4;

bool IsPrefixOf(std::string_view bytes, std::string_view whole) {
  const size_t size = std::min(bytes.size(), whole.size());
  return bytes.substr(0, size) == whole.substr(0, size);
}

Handshake Malformed(const std::string& message) {
  Handshake handshake{.kind = Handshake::Kind::kMalformed};
  handshake.error = MakeError(Reason::kProtocolError, message);
  return handshake;
}

Handshake ReadTicketRequest(std::string_view bytes) {
  if (bytes.size() < protocol::kRequestHeaderBytes) return {};
  const auto* header = reinterpret_cast<const unsigned char*>(bytes.data());
  const uint32_t version = protocol::GetUint32(header + 8);
  const uint32_t ticket_size = protocol::GetUint32(header + 12);
  if (version != protocol::kVersion) {
    return Malformed(absl::StrCat("the ticket request has version ", version, " and this service knows ",
                                  protocol::kVersion, ": use a redeem.h of this service's version"));
  }
  if (ticket_size == 0 || ticket_size > protocol::kMaxTicketBytes) {
    return Malformed(
        absl::StrCat("the ticket has ", ticket_size, " bytes and may have 1 to ", protocol::kMaxTicketBytes));
  }
  if (bytes.size() < protocol::kRequestHeaderBytes + ticket_size) return {};
  return {.kind = Handshake::Kind::kTicket,
          .ticket = std::string(bytes.substr(protocol::kRequestHeaderBytes, ticket_size))};
}

// gRPC has no time-out of its own for a connection that it is given. All that every client sends of itself, without
// waiting for an answer, must be there before: then whoever stays silent is one that has connected well and is idle.
Handshake::Kind ReadHttp2(std::string_view bytes) {
  using Kind = Handshake::Kind;
  if (bytes.size() < kHttp2Preface.size() + kFrameHeaderBytes) return Kind::kIncomplete;
  const auto* frame = reinterpret_cast<const unsigned char*>(bytes.data() + kHttp2Preface.size());
  if (frame[3] != kSettingsFrame) return Kind::kGarbage;
  const size_t payload = static_cast<size_t>(frame[0]) << 16 | static_cast<size_t>(frame[1]) << 8 | frame[2];
  const size_t whole = kHttp2Preface.size() + kFrameHeaderBytes + payload;
  return bytes.size() < std::min(whole, kMaxHandshakeBytes) ? Kind::kIncomplete : Kind::kHttp2;
}

}  // namespace

Handshake ReadHandshake(std::string_view bytes) {
  const std::string_view magic(reinterpret_cast<const char*>(protocol::kMagic), protocol::kMagicBytes);
  if (IsPrefixOf(bytes, magic)) return ReadTicketRequest(bytes);
  if (!IsPrefixOf(bytes, kHttp2Preface)) return {.kind = Handshake::Kind::kGarbage};
  return {.kind = ReadHttp2(bytes)};
}

}  // namespace weightbroker
