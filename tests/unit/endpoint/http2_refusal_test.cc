// That real gRPC clients understand it is tested in endpoint_test.cc.
#include "server/endpoint/http2_refusal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/base/error.h"
#include "tests/unit/endpoint/ticket_request.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using ::weightbroker::testing::kHttp2Preface;

// The preface with its SETTINGS, WINDOW_UPDATE, then HEADERS of 300 bytes on stream 5.
std::string ClientBytes() {
  return std::string(kHttp2Preface) + std::string("\0\0\4\x8\0\0\0\0\0\0\0\1\0", 13) +
         std::string("\0\1\x2c\1\4\0\0\0\5", 9) + std::string(300, 'h');
}

TEST(Http2Refusal, FindsTheFirstCallInPiecesOfAnySize) {
  const std::string bytes = ClientBytes();
  for (size_t piece = 1; piece <= bytes.size(); ++piece) {
    Http2Refusal refusal;
    for (size_t offset = 0; offset < bytes.size(); offset += piece) {
      refusal.Read(std::string_view(bytes).substr(offset, piece));
    }
    ASSERT_EQ(refusal.stream(), 5u) << piece;
  }
}

TEST(Http2Refusal, WaitsForACall) {
  Http2Refusal refusal;
  refusal.Read(std::string_view(ClientBytes()).substr(0, 24 + 15 + 13 + 8));
  EXPECT_FALSE(refusal.stream().has_value());
}

TEST(Http2Refusal, AnswersOnThatStreamWithCodeAndMessage) {
  Http2Refusal refusal;
  refusal.Read(ClientBytes());

  const std::string answer = refusal.Answer(MakeError(Reason::kAccessDenied, "100% no\n"));

  EXPECT_EQ(answer.substr(3, 6), std::string("\1\5\0\0\0\5", 6));  // HEADERS, END_STREAM | END_HEADERS, stream 5
  EXPECT_THAT(answer, HasSubstr(std::string("\xbgrpc-status\1"
                                            "7",
                                            14)));
  EXPECT_THAT(answer, HasSubstr("100%25 no%0A"));
  EXPECT_EQ(answer.substr(answer.size() - 17, 9), std::string("\0\0\x8\7\0\0\0\0\0", 9));  // GOAWAY
}

}  // namespace
}  // namespace weightbroker
