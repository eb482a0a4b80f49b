#include "common/base/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::StatusIs;

TEST(Error, SurvivesSerializationWithReasonAndMetadata) {
  const absl::Status error =
      MakeError(Reason::kCheckpointTruncated, "a.safetensors: truncated", {{"file", "a.safetensors"}});

  const absl::Status parsed = ParseRpcStatus(SerializeRpcStatus(error));

  EXPECT_THAT(parsed, StatusIs(Reason::kCheckpointTruncated, HasSubstr("truncated")));
  EXPECT_THAT(parsed, HasMetadata("file", "a.safetensors"));
}

TEST(Error, StaysUnderFourKibibytesWhateverItCarries) {
  std::map<std::string, std::string> metadata;
  for (int i = 0; i < 1000; ++i) metadata["field_" + std::to_string(i)] = std::string(100, 'v');
  const absl::Status error = MakeError(Reason::kFingerprintMismatch, std::string(100'000, 'm'), metadata);

  const std::string bytes = SerializeRpcStatus(error);

  EXPECT_LT(bytes.size(), 4096u);
  const absl::Status parsed = ParseRpcStatus(bytes);
  EXPECT_THAT(parsed, StatusIs(Reason::kFingerprintMismatch, HasSubstr("more bytes)")));
  EXPECT_EQ(GetErrorDetails(parsed).metadata.count("metadata_left_out"), 1u);
}

TEST(Error, IsUtf8WhateverItNames) {
  // A strict client's parser refuses an ErrorInfo with any other bytes in it, reason and all.
  const absl::Status error =
      MakeError(Reason::kDeviceUnknown, "device \"\xc3\" is not there", {{"device\xff", "\xe2\x82"}});
  const absl::Status parsed = ParseRpcStatus(SerializeRpcStatus(error));
  EXPECT_THAT(parsed, StatusIs(Reason::kDeviceUnknown, HasSubstr("device \"\\xc3\" is")));
  EXPECT_THAT(parsed, HasMetadata("device\\xff", "\\xe2\\x82"));
}

TEST(Error, RefusesBytesThatAreNoStatus) {
  EXPECT_THAT(ParseRpcStatus("\xff\xff\xff"), StatusIs(Reason::kProtocolError));
}

TEST(Error, NamesTheErrnoOfASystemError) {
  EXPECT_THAT(SystemError("open /x", ENOENT), HasMetadata("errno", "ENOENT"));
}

}  // namespace
}  // namespace weightbroker
