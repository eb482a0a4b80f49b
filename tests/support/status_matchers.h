// Matchers that name the error expected, never "not ok":
//
//   EXPECT_THAT(result, StatusIs(Reason::kCheckpointTruncated, HasSubstr("model.safetensors")));
//   ASSERT_THAT(result, IsOk());
#pragma once

#include <gmock/gmock.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/error.h"

namespace weightbroker::testing {

inline const absl::Status& StatusOf(const absl::Status& status) { return status; }
template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

MATCHER(IsOk, "is ok") {
  *result_listener << StatusOf(arg).ToString();
  return StatusOf(arg).ok();
}

// Matches the reason, its canonical code, and the message.
MATCHER_P2(StatusIsImpl, reason, message_matcher, std::string("has reason ") + std::string(ReasonName(reason))) {
  const absl::Status& status = StatusOf(arg);
  *result_listener << status.ToString();
  if (!HasReason(status, reason) || status.code() != ReasonCode(reason)) return false;
  return ::testing::ExplainMatchResult(::testing::Matcher<std::string>(message_matcher), std::string(status.message()),
                                       result_listener);
}

template <typename M>
auto StatusIs(Reason reason, M message_matcher) {
  return StatusIsImpl(reason, message_matcher);
}
inline auto StatusIs(Reason reason) { return StatusIsImpl(reason, ::testing::Matcher<std::string>(::testing::_)); }

// Matches an ErrorInfo.metadata value.
MATCHER_P2(HasMetadata, key, value, std::string("has metadata ") + key + "=" + value) {
  const auto details = GetErrorDetails(StatusOf(arg));
  const auto it = details.metadata.find(key);
  *result_listener << StatusOf(arg).ToString();
  return it != details.metadata.end() && it->second == value;
}

}  // namespace weightbroker::testing
