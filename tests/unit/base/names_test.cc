#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "common/base/alias_name.h"
#include "common/base/near_names.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::ElementsAre;
using testing::IsOk;
using testing::StatusIs;

TEST(AliasName, HasANameAndATag) {
  for (const std::string& name : {std::string("llama@live"), std::string("Qwen3-8B_x.1@2026-01"), std::string("a@b")}) {
    EXPECT_THAT(CheckAliasName(name), IsOk()) << name;
  }
  for (const std::string& name : {std::string("llama"), std::string("@live"), std::string("llama@"),
                                  std::string("a@b@c"), std::string("models:llama@live"), std::string("a/b@live"),
                                  std::string("a b@live"), std::string(127, 'a') + "@b"}) {
    EXPECT_THAT(CheckAliasName(name), StatusIs(Reason::kInvalidArgument)) << name;
  }
}

TEST(NearNames, AreThoseThatTakeFewestChanges) {
  EXPECT_EQ(EditDistance("live", "life"), 1u);
  EXPECT_EQ(EditDistance("", "abc"), 3u);
  EXPECT_THAT(NearNames("lama@live", {"qwen@live", "llama@old", "llama@live"}, 2),
              ElementsAre("llama@live", "qwen@live"));
}

}  // namespace
}  // namespace weightbroker
