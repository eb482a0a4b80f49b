#include "client/tool/output.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "common/base/error.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker::tool {
namespace {

using ::testing::HasSubstr;

TEST(ExitCode, IsFourWhereNoServiceAnswersAndThreeWhereOneRefuses) {
  EXPECT_EQ(ExitCodeFor(absl::OkStatus()), 0);
  EXPECT_EQ(ExitCodeFor(MakeError(Reason::kServiceUnavailable, "nobody there")), 4);
  EXPECT_EQ(ExitCodeFor(MakeError(Reason::kDeadlineExceeded, "too slow")), 4);
  EXPECT_EQ(ExitCodeFor(MakeError(Reason::kLeased, "in use")), 3);
}

TEST(PrintError, GivesPeopleAndProgramsTheSame) {
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();

  const ExitCode code = PrintError(MakeError(Reason::kLeased, "two engines\xff hold it", {{"lease_count", "2"}}), true);

  const auto json = nlohmann::json::parse(::testing::internal::GetCapturedStdout());
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(code, kRefused);
  EXPECT_EQ(json["ok"], false);
  EXPECT_EQ(json["reason"], "LEASED");
  EXPECT_EQ(json["metadata"]["lease_count"], "2");
  EXPECT_THAT(text, HasSubstr("hold it"));
  EXPECT_THAT(text, HasSubstr("LEASED"));
}

TEST(PrintError, LetsNoMessageControlTheTerminal) {
  ::testing::internal::CaptureStderr();

  PrintError(MakeError(Reason::kLeased, "clear\x1b[2J", {{"model", "\x1b]0;title"}}), false);

  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr("clear\\x1b[2J"));
  EXPECT_THAT(text, ::testing::Not(HasSubstr("\x1b")));
}

TEST(PrintJson, LeavesOutNothingButMessagesThatAreAbsent) {
  ::testing::internal::CaptureStdout();

  PrintJson(v1::WeightSet());

  const auto json = nlohmann::json::parse(::testing::internal::GetCapturedStdout());
  EXPECT_EQ(json["generation"], "0");
  EXPECT_EQ(json["shards"], nlohmann::json::array());
  EXPECT_FALSE(json.contains("resident_time"));
}

TEST(PrintJson, NamesFieldsAsTheProtosDo) {
  ::testing::internal::CaptureStdout();

  PrintJson(v1::Slab());

  const auto json = nlohmann::json::parse(::testing::internal::GetCapturedStdout());
  EXPECT_EQ(json["size_bytes"], "0");
  EXPECT_EQ(json["handle_kind"], "HANDLE_KIND_UNSPECIFIED");
}

}  // namespace
}  // namespace weightbroker::tool
