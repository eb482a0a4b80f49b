#include "client/tool/remedy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/base/reason.h"

namespace weightbroker::tool {
namespace {

using ::testing::Eq;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

TEST(RemedyFor, HasAWordOnEveryReason) {
#define WEIGHTBROKER_EXPECT_REMEDY(enumerator, name, code) EXPECT_THAT(RemedyFor(name), Not(IsEmpty())) << name;
  WEIGHTBROKER_REASONS(WEIGHTBROKER_EXPECT_REMEDY)
#undef WEIGHTBROKER_EXPECT_REMEDY
}

TEST(RemedyFor, IsTextWithoutMarks) {
  EXPECT_THAT(RemedyFor("CHECKPOINT_TRUNCATED"), Eq("Download it again."));
  EXPECT_THAT(RemedyFor("MODEL_ROOT_UNKNOWN"), Not(HasSubstr("`")));
}

TEST(RemedyFor, IsEmptyForAReasonThatThePageDoesNotHave) { EXPECT_THAT(RemedyFor("NO_SUCH_REASON"), IsEmpty()); }

}  // namespace
}  // namespace weightbroker::tool
