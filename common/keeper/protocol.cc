#include "common/keeper/protocol.h"

#include <concepts>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

// The packet: this header, then the key, then the value. Little-endian, no padding.
//   0  magic "WBKP"     4  version u16    6  type u16      8  request_id i64   16  number i64
//  24  part i32        28  parts i32     32  status i32   36  key bytes u32    40  value bytes u32
constexpr std::string_view kMagic = "WBKP";

template <std::integral T>
void Append(T value, std::string* out) {
  for (size_t i = 0; i < sizeof(T); ++i) {
    out->push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i)));
  }
}

// Takes an integer from the front of `packet`, which must have it.
template <std::integral T>
T Take(std::string_view* packet) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= static_cast<uint64_t>(static_cast<uint8_t>((*packet)[i])) << (8 * i);
  packet->remove_prefix(sizeof(T));
  return static_cast<T>(value);
}

bool IsPrintableAscii(std::string_view text) {
  for (const char c : text) {
    if (c < ' ' || c > '~') return false;
  }
  return true;
}

// What both directions demand; an empty string if it is all right.
std::string FaultOf(std::string_view key, uint64_t value_bytes, int32_t part, int32_t parts) {
  if (key.size() > kMaxKeeperKeyBytes) {
    return absl::StrCat("the key has ", key.size(), " bytes; at most ", kMaxKeeperKeyBytes, " are allowed");
  }
  if (!IsPrintableAscii(key)) return "the key has bytes that are not printable ASCII";
  if (value_bytes > kMaxKeeperValueBytes) {
    return absl::StrCat("the value has ", value_bytes, " bytes; at most ", kMaxKeeperValueBytes, " are allowed");
  }
  if (part < 0 || part >= parts) return absl::StrCat("part ", part, " of ", parts, " is not between 0 and the last");
  return "";
}

absl::Status Malformed(const std::string& fault) {
  return MakeError(Reason::kProtocolError, absl::StrCat("a packet of the keeper's protocol is malformed: ", fault),
                   {{"fault", fault}});
}

}  // namespace

std::string_view KeeperMessageTypeName(KeeperMessageType type) {
  switch (type) {
#define WEIGHTBROKER_KEEPER_MESSAGE_NAME(enumerator, name, number) \
  case KeeperMessageType::enumerator:                              \
    return name;
    WEIGHTBROKER_KEEPER_MESSAGES(WEIGHTBROKER_KEEPER_MESSAGE_NAME)
#undef WEIGHTBROKER_KEEPER_MESSAGE_NAME
  }
  return "unknown";
}

absl::StatusOr<std::string> EncodeKeeperMessage(const KeeperMessage& message) {
  if (const std::string fault = FaultOf(message.key, message.value.size(), message.part, message.parts);
      !fault.empty()) {
    return MakeError(Reason::kInvalidArgument, absl::StrCat("a message to the keeper cannot be sent: ", fault),
                     {{"fault", fault}});
  }
  std::string packet(kMagic);
  packet.reserve(kKeeperHeaderBytes + message.key.size() + message.value.size());
  Append(message.version, &packet);
  Append(static_cast<uint16_t>(message.type), &packet);
  Append(message.request_id, &packet);
  Append(message.number, &packet);
  Append(message.part, &packet);
  Append(message.parts, &packet);
  Append(message.status, &packet);
  Append(static_cast<uint32_t>(message.key.size()), &packet);
  Append(static_cast<uint32_t>(message.value.size()), &packet);
  return packet + message.key + message.value;
}

absl::StatusOr<KeeperMessage> DecodeKeeperMessage(std::string_view packet) {
  if (packet.size() < kKeeperHeaderBytes) {
    return Malformed(absl::StrCat("it has ", packet.size(), " bytes; a header alone has ", kKeeperHeaderBytes));
  }
  if (packet.substr(0, kMagic.size()) != kMagic) return Malformed("it does not begin with WBKP");
  packet.remove_prefix(kMagic.size());
  KeeperMessage message;
  message.version = Take<uint16_t>(&packet);
  message.type = static_cast<KeeperMessageType>(Take<uint16_t>(&packet));
  message.request_id = Take<int64_t>(&packet);
  message.number = Take<int64_t>(&packet);
  message.part = Take<int32_t>(&packet);
  message.parts = Take<int32_t>(&packet);
  message.status = Take<int32_t>(&packet);
  const uint64_t key_bytes = Take<uint32_t>(&packet);
  const uint64_t value_bytes = Take<uint32_t>(&packet);
  if (key_bytes + value_bytes > packet.size()) {
    return Malformed(
        absl::StrCat("key and value should have ", key_bytes + value_bytes, " bytes, ", packet.size(), " are there"));
  }
  // A later version may add fields behind the value.
  if (key_bytes + value_bytes < packet.size() && message.version <= kKeeperProtocolVersion) {
    return Malformed(absl::StrCat(packet.size() - key_bytes - value_bytes, " bytes follow the value"));
  }
  message.key = packet.substr(0, key_bytes);
  message.value = packet.substr(key_bytes, value_bytes);
  if (const std::string fault = FaultOf(message.key, value_bytes, message.part, message.parts); !fault.empty()) {
    return Malformed(fault);
  }
  return message;
}

}  // namespace weightbroker
