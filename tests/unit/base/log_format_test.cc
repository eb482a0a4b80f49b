#include "common/base/log_format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace weightbroker {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::SizeIs;

std::string Json(const LogFields& fields) {
  return FormatJsonLogLine("2026-11-29T17:11:36.123Z", LogLevel::kInfo, "load.finished", fields);
}

TEST(JsonLogLine, IsOneObjectWithWhatEveryLineHasFirst) {
  SetLogProgram("broker");
  EXPECT_EQ(Json({{"bytes", "42"}}), R"({"time":"2026-11-29T17:11:36.123Z","level":"info","program":"broker","pid":)" +
                                         std::to_string(getpid()) + R"(,"event":"load.finished","bytes":"42"})");
}

TEST(JsonLogLine, CannotBeForgedByAHostileValue) {
  EXPECT_THAT(Json({{"name", "a\"},\n{\"event\":\"b\\"}}), EndsWith(R"(,"name":"a\"},\u000a{\"event\":\"b\\"})"));
  EXPECT_THAT(Json({{"name", "\xff\x01"}}), EndsWith(R"(,"name":"\\xff\u0001"})"));
  EXPECT_THAT(Json({{"event", "forged"}}), EndsWith(R"(,"event_":"forged"})"));
}

TEST(JsonLogLine, KeepsWhatIsUtf8) { EXPECT_THAT(Json({{"name", "größe"}}), EndsWith(R"("name":"größe"})")); }

TEST(JsonLogLine, StaysShortEnoughForOneWriteAndSaysWhatIsLeftOut) {
  const std::string line =
      Json({{"a", std::string(5000, 'x')}, {"b", std::string(5000, 'y')}, {"c", std::string(5000, 'z')}});
  EXPECT_THAT(line, SizeIs(::testing::Le(4096u)));
  EXPECT_THAT(line, HasSubstr("more bytes)"));
  EXPECT_THAT(line, EndsWith(R"(,"fields_left_out":"1"})"));
}

TEST(LogFormat, IsHandedOnToProgramsThatAreStarted) {
  SetLogFormat(LogFormat::kJson);
  EXPECT_STREQ(getenv("WEIGHTBROKER_LOG_FORMAT"), "json");
  ::testing::internal::CaptureStderr();
  Log(LogLevel::kError, "test.line", {{"key", "a b"}});
  const std::string json = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(json, HasSubstr(R"("event":"test.line","key":"a b"})"));
  SetLogFormat(LogFormat::kText);
  ::testing::internal::CaptureStderr();
  Log(LogLevel::kError, "test.line", {{"key", "a b"}});
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("event=test.line key=\"a b\"\n"));
}

}  // namespace
}  // namespace weightbroker
