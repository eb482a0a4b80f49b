#include "server/endpoint/handshake.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"
#include "tests/unit/endpoint/ticket_request.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using ::weightbroker::testing::kHttp2Preface;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::TicketRequest;
using Kind = Handshake::Kind;

TEST(Handshake, WaitsForAllOfThePrefaceAndTheSettingsThatBelongToIt) {
  for (size_t size = 0; size < kHttp2Preface.size(); ++size) {
    EXPECT_EQ(ReadHandshake(kHttp2Preface.substr(0, size)).kind, Kind::kIncomplete) << size;
  }
  EXPECT_EQ(ReadHandshake(kHttp2Preface).kind, Kind::kHttp2);
  EXPECT_EQ(ReadHandshake(std::string(kHttp2Preface) + "more").kind, Kind::kHttp2);
}

TEST(Handshake, WaitsForNoMoreThan64Settings) {
  const std::string frame("\1\0\0\4\0\0\0\0\0", 9);  // of 65,536 bytes, which gRPC may refuse
  std::string bytes = std::string(kHttp2Preface.substr(0, 24)) + frame;
  bytes.resize(kMaxHandshakeBytes - 1);
  EXPECT_EQ(ReadHandshake(bytes).kind, Kind::kIncomplete);
  EXPECT_EQ(ReadHandshake(bytes + " ").kind, Kind::kHttp2);
}

TEST(Handshake, RefusesAnotherFrameWhereTheSettingsBelong) {
  std::string headers_first(kHttp2Preface);
  headers_first[24 + 3] = 1;
  EXPECT_EQ(ReadHandshake(headers_first).kind, Kind::kGarbage);
}

TEST(Handshake, WaitsForTheWholeTicketRequest) {
  const std::string request = TicketRequest(std::string(32, 't'));
  for (size_t size = 0; size < request.size(); ++size) {
    EXPECT_EQ(ReadHandshake(request.substr(0, size)).kind, Kind::kIncomplete) << size;
  }
  const Handshake whole = ReadHandshake(request + "more");
  EXPECT_EQ(whole.kind, Kind::kTicket);
  EXPECT_EQ(whole.ticket, std::string(32, 't'));
}

TEST(Handshake, KnowsGarbageByItsFirstWrongByte) {
  std::string nearly_http2(kHttp2Preface);
  nearly_http2[23] = 'x';
  std::string nearly_ticket = TicketRequest("t");
  nearly_ticket[7] = 'x';

  EXPECT_EQ(ReadHandshake("G").kind, Kind::kGarbage);
  EXPECT_EQ(ReadHandshake("GET / HTTP/1.1\r\n").kind, Kind::kGarbage);
  EXPECT_EQ(ReadHandshake(std::string_view("\0", 1)).kind, Kind::kGarbage);
  EXPECT_EQ(ReadHandshake(nearly_http2).kind, Kind::kGarbage);
  EXPECT_EQ(ReadHandshake(nearly_ticket).kind, Kind::kGarbage);
}

TEST(Handshake, RefusesAnotherVersionNamingBoth) {
  const Handshake handshake = ReadHandshake(TicketRequest("ticket", /*version=*/2));

  EXPECT_EQ(handshake.kind, Kind::kMalformed);
  EXPECT_THAT(handshake.error, StatusIs(Reason::kProtocolError, HasSubstr("version 2 and this service knows 1")));
}

TEST(Handshake, RefusesATicketSizeOutOfRangeBeforeItArrives) {
  EXPECT_EQ(ReadHandshake(TicketRequest(std::string(64, 't'))).kind, Kind::kTicket);
  EXPECT_EQ(ReadHandshake(TicketRequest(std::string(65, 't')).substr(0, 16)).kind, Kind::kMalformed);
  EXPECT_EQ(ReadHandshake(TicketRequest("")).kind, Kind::kMalformed);
}

}  // namespace
}  // namespace weightbroker
