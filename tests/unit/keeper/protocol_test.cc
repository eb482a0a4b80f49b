#include "common/keeper/protocol.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "common/keeper/parts.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;

KeeperMessage FullMessage() {
  return {.type = KeeperMessageType::kPut,
          .version = 7,
          .request_id = -3,
          .number = 0x0102030405060708,
          .part = 2,
          .parts = 5,
          .status = -9,
          .key = "shard/0a1b/0",
          .value = std::string("\0\xff value", 8)};
}

void ExpectEqual(const KeeperMessage& a, const KeeperMessage& b) {
  EXPECT_EQ(a.type, b.type);
  EXPECT_EQ(a.version, b.version);
  EXPECT_EQ(a.request_id, b.request_id);
  EXPECT_EQ(a.number, b.number);
  EXPECT_EQ(a.part, b.part);
  EXPECT_EQ(a.parts, b.parts);
  EXPECT_EQ(a.status, b.status);
  EXPECT_EQ(a.key, b.key);
  EXPECT_EQ(a.value, b.value);
}

TEST(KeeperProtocol, GivesBackEveryFieldOfAMessage) {
  const auto packet = EncodeKeeperMessage(FullMessage());
  ASSERT_THAT(packet, IsOk());
  const auto decoded = DecodeKeeperMessage(*packet);
  ASSERT_THAT(decoded, IsOk());
  ExpectEqual(*decoded, FullMessage());
}

TEST(KeeperProtocol, HasTheSameBytesOnEveryMachineAndInEveryRelease) {
  const auto packet = EncodeKeeperMessage({.type = KeeperMessageType::kPut,
                                           .version = 1,
                                           .request_id = 2,
                                           .number = 3,
                                           .part = 0,
                                           .parts = 1,
                                           .status = 4,
                                           .key = "k",
                                           .value = "vw"});
  ASSERT_THAT(packet, IsOk());
  const unsigned char expected[] = {'W', 'B', 'K', 'P', 1, 0, 6, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0,   0,   0,  0,
                                    0,   0,   0,   0,   1, 0, 0, 0, 4, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 'k', 'v', 'w'};
  EXPECT_EQ(*packet, std::string(reinterpret_cast<const char*>(expected), sizeof(expected)));
}

TEST(KeeperProtocol, RefusesToEncodeWhatIsOverALimitNamingIt) {
  KeeperMessage message = FullMessage();
  message.key = std::string(kMaxKeeperKeyBytes + 1, 'k');
  EXPECT_THAT(EncodeKeeperMessage(message), StatusIs(Reason::kInvalidArgument, HasSubstr("the key has 201 bytes")));
  message = FullMessage();
  message.value = std::string(kMaxKeeperValueBytes + 1, 'v');
  EXPECT_THAT(EncodeKeeperMessage(message), StatusIs(Reason::kInvalidArgument, HasSubstr("the value has 32769 bytes")));
  message = FullMessage();
  message.key = "tab\t";
  EXPECT_THAT(EncodeKeeperMessage(message), StatusIs(Reason::kInvalidArgument, HasSubstr("printable")));
  message = FullMessage();
  message.part = 5;
  EXPECT_THAT(EncodeKeeperMessage(message), StatusIs(Reason::kInvalidArgument, HasSubstr("part 5 of 5")));
}

TEST(KeeperProtocol, EncodesKeyAndValueAtTheirLimits) {
  KeeperMessage message = FullMessage();
  message.key = std::string(kMaxKeeperKeyBytes, '~');
  message.value = std::string(kMaxKeeperValueBytes, '\0');
  const auto packet = EncodeKeeperMessage(message);
  ASSERT_THAT(packet, IsOk());
  const auto decoded = DecodeKeeperMessage(*packet);
  ASSERT_THAT(decoded, IsOk());
  ExpectEqual(*decoded, message);
}

TEST(KeeperProtocol, RefusesEveryTruncationOfAPacket) {
  const std::string packet = *EncodeKeeperMessage(FullMessage());
  for (size_t length = 0; length < packet.size(); ++length) {
    EXPECT_THAT(DecodeKeeperMessage(packet.substr(0, length)), StatusIs(Reason::kProtocolError)) << length;
  }
}

TEST(KeeperProtocol, RefusesBytesBehindTheValueOfItsOwnVersionOnly) {
  KeeperMessage message = FullMessage();
  message.version = kKeeperProtocolVersion;
  EXPECT_THAT(DecodeKeeperMessage(*EncodeKeeperMessage(message) + "x"),
              StatusIs(Reason::kProtocolError, HasSubstr("1 bytes follow the value")));
  message.version = kKeeperProtocolVersion + 1;
  const auto decoded = DecodeKeeperMessage(*EncodeKeeperMessage(message) + "a field of the future");
  ASSERT_THAT(decoded, IsOk());
  ExpectEqual(*decoded, message);
}

TEST(KeeperProtocol, DecodesATypeThatItDoesNotKnow) {
  KeeperMessage message = FullMessage();
  message.type = static_cast<KeeperMessageType>(999);
  const auto decoded = DecodeKeeperMessage(*EncodeKeeperMessage(message));
  ASSERT_THAT(decoded, IsOk());
  EXPECT_EQ(KeeperMessageTypeName(decoded->type), "unknown");
}

// Whatever decodes must encode to the same bytes, so that no two packets mean the same.
void ExpectRefusedOrCanonical(const std::string& packet) {
  const auto decoded = DecodeKeeperMessage(packet);
  if (!decoded.ok()) {
    EXPECT_THAT(decoded, StatusIs(Reason::kProtocolError));
    return;
  }
  if (decoded->version > kKeeperProtocolVersion) return;  // may have more behind the value
  const auto encoded = EncodeKeeperMessage(*decoded);
  ASSERT_THAT(encoded, IsOk());
  EXPECT_EQ(*encoded, packet);
}

TEST(KeeperProtocol, RefusesRandomBytesOrReadsThemAsTheOnlyMessageTheyAre) {
  std::mt19937 random(20261129);
  const std::string valid = *EncodeKeeperMessage(FullMessage());
  for (int round = 0; round < 20'000; ++round) {
    std::string packet(random() % 100, '\0');
    for (char& c : packet) c = static_cast<char>(random());
    ExpectRefusedOrCanonical(packet);

    std::string mutated = valid;
    for (unsigned flips = 1 + random() % 3; flips > 0; --flips) {
      mutated[random() % mutated.size()] = static_cast<char>(random());
    }
    ExpectRefusedOrCanonical(mutated);
  }
}

TEST(KeeperParts, CoverValueAndDescriptorsWholeAndInOrder) {
  for (const size_t value_bytes :
       {size_t{0}, size_t{1}, kMaxKeeperValueBytes, kMaxKeeperValueBytes + 1, size_t{100'000}}) {
    for (const size_t fds : {size_t{0}, size_t{1}, size_t{250}, size_t{251}, size_t{1'920}}) {
      std::string value(value_bytes, '\0');
      for (size_t i = 0; i < value_bytes; ++i) value[i] = static_cast<char>(i % 251);
      std::vector<int> numbers(fds);
      for (size_t i = 0; i < fds; ++i) numbers[i] = static_cast<int>(i);

      std::string joined;
      std::vector<int> joined_numbers;
      const int parts = CountParts(value_bytes, fds);
      for (int part = 0; part < parts; ++part) {
        const auto piece = FdsOfPart(std::span<const int>(numbers), part);
        EXPECT_LE(piece.size(), static_cast<size_t>(kMaxKeeperFdsPerPacket));
        joined_numbers.insert(joined_numbers.end(), piece.begin(), piece.end());
        joined += ValueOfPart(value, part);
      }
      EXPECT_EQ(joined, value);
      EXPECT_EQ(joined_numbers, numbers);
    }
  }
  EXPECT_EQ(CountParts(0, 0), 1);
  EXPECT_EQ(CountParts(kMaxKeeperValueBytes, 250), 1);
  EXPECT_EQ(CountParts(kMaxKeeperValueBytes + 1, 0), 2);
  EXPECT_EQ(CountParts(0, 300), 2);
}

}  // namespace
}  // namespace weightbroker
