#include "common/base/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(Log, QuotesValuesSoThatAHostileNameCannotForgeALine) {
  const std::string line = FormatLogLine(LogLevel::kInfo, "load.failed", {{"file", "a\nlevel=error event=\"x\""}});

  EXPECT_THAT(line, HasSubstr("file=\"a\\nlevel=error event=\\\"x\\\"\""));
  EXPECT_THAT(line, Not(HasSubstr("\n")));
}

TEST(Log, LeavesPlainValuesPlain) {
  EXPECT_THAT(FormatLogLine(LogLevel::kWarning, "a.b", {{"bytes", "12"}}), HasSubstr("level=warning"));
  EXPECT_THAT(FormatLogLine(LogLevel::kWarning, "a.b", {{"bytes", "12"}}), HasSubstr("event=a.b bytes=12"));
}

}  // namespace
}  // namespace weightbroker
