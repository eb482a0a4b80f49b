#include "weightbroker/status.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "client/src/connection.h"
#include "client/src/status_conversion.h"
#include "common/base/error.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::StatusIs;

TEST(PublicStatus, KeepsCodeReasonMessageAndMetadata) {
  const Status status = client::ToPublic(MakeError(Reason::kNotResident, "nothing of that kind", {{"model", "/m"}}));

  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  EXPECT_EQ(status.reason(), "NOT_RESIDENT");
  EXPECT_EQ(status.message(), "nothing of that kind");
  EXPECT_THAT(status.metadata(), UnorderedElementsAre(Pair("model", "/m")));
  EXPECT_EQ(status.ToString(), "NOT_FOUND: nothing of that kind [NOT_RESIDENT]");
}

TEST(PublicStatus, NeverLeavesAnErrorWithoutAReason) {
  EXPECT_EQ(client::ToPublic(absl::InternalError("from elsewhere")).reason(), "PROTOCOL_ERROR");
}

TEST(PublicStatus, NamesEveryCodeAsTheCanonicalOneOfThatNumber) {
  for (int code = 0; code <= 16; ++code) {
    EXPECT_EQ(StatusCodeName(static_cast<StatusCode>(code)),
              absl::StatusCodeToString(static_cast<absl::StatusCode>(code)));
  }
}

TEST(Result, GivesMoveOnlyValues) {
  Result<std::unique_ptr<int>> result = std::make_unique<int>(7);

  ASSERT_TRUE(result.ok());
  EXPECT_TRUE(result.status().ok());
  const std::unique_ptr<int> taken = *std::move(result);
  EXPECT_EQ(*taken, 7);
}

TEST(ResultDeathTest, SaysWhyThereIsNoValue) {
  const Result<int> result = Status(StatusCode::kNotFound, "NOT_RESIDENT", "no such set");

  EXPECT_DEATH(static_cast<void>(*result), "no such set \\[NOT_RESIDENT\\]");
}

TEST(GrpcError, IsReadFromItsDetails) {
  const absl::Status sent = MakeError(Reason::kFingerprintMismatch, "it differs", {{"spec.dtype", "BF16 is not F16"}});
  const grpc::Status received(grpc::StatusCode::FAILED_PRECONDITION, "it differs", SerializeRpcStatus(sent));

  EXPECT_THAT(client::FromGrpc(received), StatusIs(Reason::kFingerprintMismatch, HasSubstr("it differs")));
  EXPECT_THAT(client::FromGrpc(received), HasMetadata("spec.dtype", "BF16 is not F16"));
}

TEST(GrpcError, KeepsItsCodeWhereDetailsAreMissingOrGarbage) {
  const absl::Status bare = client::FromGrpc(grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "no such method"));
  const absl::Status garbage =
      client::FromGrpc(grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone", std::string("\xff\xff", 2)));

  EXPECT_EQ(bare.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(GetErrorDetails(bare).reason, "PROTOCOL_ERROR");
  EXPECT_THAT(garbage, StatusIs(Reason::kServiceUnavailable));
}

TEST(GrpcError, IsNeverWithoutAMessage) {
  EXPECT_THAT(client::FromGrpc(grpc::Status(grpc::StatusCode::INTERNAL, "")),
              StatusIs(Reason::kProtocolError, HasSubstr("code 13")));
}

}  // namespace
}  // namespace weightbroker
