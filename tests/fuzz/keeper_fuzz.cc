// The input is a packet of the keeper's protocol; and, read differently, the fields of a message, and what a keeper has
// written down for the one that replaces it.
#include <span>
#include <utility>
#include <vector>

#include "common/keeper/parts.h"
#include "common/keeper/protocol.h"
#include "server/keeper/keeper_state.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/target.h"

namespace weightbroker {
namespace {

void CheckSame(const KeeperMessage& a, const KeeperMessage& b) {
  FUZZ_CHECK(a.type == b.type && a.version == b.version && a.request_id == b.request_id && a.number == b.number);
  FUZZ_CHECK(a.part == b.part && a.parts == b.parts && a.status == b.status);
  FUZZ_CHECK(a.key == b.key && a.value == b.value);
}

// Of what is accepted there is one spelling: no two packets mean the same.
void DecodePacket(std::string_view packet) {
  const auto message = DecodeKeeperMessage(packet);
  if (!message.ok()) return CheckRefusal(message.status());
  FUZZ_CHECK(message->key.size() <= kMaxKeeperKeyBytes && message->value.size() <= kMaxKeeperValueBytes);
  FUZZ_CHECK(message->part >= 0 && message->part < message->parts);
  FUZZ_CHECK(!KeeperMessageTypeName(message->type).empty());
  const auto encoded = EncodeKeeperMessage(*message);
  FUZZ_CHECK(encoded.ok());
  if (message->version <= kKeeperProtocolVersion) {
    FUZZ_CHECK(*encoded == packet);
  } else {  // a later one may have more behind
    FUZZ_CHECK(packet.substr(0, encoded->size()) == *encoded);
  }
  CheckSame(*message, *DecodeKeeperMessage(*encoded));
}

void EncodeMessage(std::string_view input) {
  KeeperMessage message;
  message.type = static_cast<KeeperMessageType>(TakeInteger<uint16_t>(input));
  message.version = TakeInteger<uint16_t>(input);
  message.request_id = TakeInteger<int64_t>(input);
  message.number = TakeInteger<int64_t>(input);
  message.part = TakeInteger<int32_t>(input);
  message.parts = TakeInteger<int32_t>(input);
  message.status = TakeInteger<int32_t>(input);
  message.key = TakeText(input);
  const auto shape = TakeInteger<uint8_t>(input);
  message.value = input;
  if (shape == 0xFF) message.value.resize(kMaxKeeperValueBytes + input.size() % 3 - 1);
  const auto packet = EncodeKeeperMessage(message);
  if (!packet.ok()) return CheckRefusal(packet.status());
  const auto decoded = DecodeKeeperMessage(*packet);
  FUZZ_CHECK(decoded.ok());
  CheckSame(*decoded, message);
}

// Parts are whole and in order: each begins where the one before it ended.
void CutIntoParts(std::string_view input) {
  static const std::string value(4 * kMaxKeeperValueBytes, '\0');
  static const std::vector<int> fds(2000);
  const std::string_view cut = std::string_view(value).substr(0, TakeInteger<uint32_t>(input) % value.size());
  const auto cut_fds = std::span(fds).first(TakeInteger<uint16_t>(input) % fds.size());
  const int parts = CountParts(cut.size(), cut_fds.size());
  size_t bytes = 0;
  size_t descriptors = 0;
  for (int part = 0; part < parts; ++part) {
    const std::string_view piece = ValueOfPart(cut, part);
    const auto piece_fds = FdsOfPart(cut_fds, part);
    FUZZ_CHECK(piece.empty() || piece.data() == cut.data() + bytes);
    FUZZ_CHECK(piece_fds.empty() || piece_fds.data() == cut_fds.data() + descriptors);
    FUZZ_CHECK(piece.size() <= kMaxKeeperValueBytes && piece_fds.size() <= static_cast<size_t>(kMaxKeeperFdsPerPacket));
    bytes += piece.size();
    descriptors += piece_fds.size();
  }
  FUZZ_CHECK(bytes == cut.size() && descriptors == cut_fds.size());
}

void ParseState(std::string_view input) {
  const auto state = ParseKeeperState(input);
  if (!state.ok()) return CheckRefusal(state.status());
  const std::string bytes = SerializeKeeperState(*state);
  const auto again = ParseKeeperState(bytes);
  FUZZ_CHECK(again.ok());
  FUZZ_CHECK(SerializeKeeperState(*again) == bytes);
  FUZZ_CHECK(again->Fds() == state->Fds());
}

}  // namespace
}  // namespace weightbroker

FUZZ_TARGET(keeper) {
  using namespace weightbroker;
  DecodePacket(input);
  EncodeMessage(input);
  CutIntoParts(input);
  ParseState(input);
}
