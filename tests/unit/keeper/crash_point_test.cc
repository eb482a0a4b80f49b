#include "common/keeper/crash_point.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace weightbroker {
namespace {

using Moment = CrashPoint::Moment;
using Type = KeeperMessageType;

TEST(CrashPoint, IsHitAtTheChosenOccurrenceOnly) {
  const CrashPoint point("keeper_message:put:after:3", "");
  EXPECT_FALSE(point.IsHit(Type::kPut, Moment::kAfter));
  EXPECT_FALSE(point.IsHit(Type::kPut, Moment::kBefore));
  EXPECT_FALSE(point.IsHit(Type::kDrop, Moment::kAfter));
  EXPECT_FALSE(point.IsHit(Type::kPut, Moment::kAfter));
  EXPECT_TRUE(point.IsHit(Type::kPut, Moment::kAfter));
  EXPECT_FALSE(point.IsHit(Type::kPut, Moment::kAfter));
}

TEST(CrashPoint, IsNeverHitUnlessSetOrWhenMalformed) {
  for (const char* text : {"", "put:after:1", "keeper_message:put:after", "keeper_message:put:after:x",
                           "keeper_message:put:after:0", "other:put:after:1"}) {
    const CrashPoint point(text, "");
    EXPECT_FALSE(point.IsHit(Type::kPut, Moment::kAfter)) << text;
  }
}

TEST(CrashPoint, IsHitByEveryEntryWhoseKeyBeginsAsSaid) {
  const CrashPoint point("kept_entry:shard/", "");
  EXPECT_TRUE(point.IsHit("shard/a"));
  EXPECT_TRUE(point.IsHit("shard/b"));
  EXPECT_FALSE(point.IsHit("load/shard/"));
  EXPECT_FALSE(point.IsHit(""));
  EXPECT_FALSE(CrashPoint("", "").IsHit("shard/a"));
  EXPECT_FALSE(CrashPoint("keeper_message:put:after:1", "").IsHit("shard/a"));
}

TEST(CrashPoint, UsesUpItsTokenSoThatTheNextBrokerLives) {
  char token[] = "/tmp/weightbroker_crash_token_XXXXXX";
  close(mkstemp(token));
  const CrashPoint first("keeper_message:hello:before:1", token);
  const CrashPoint second("keeper_message:hello:before:1", token);
  EXPECT_TRUE(first.IsHit(Type::kHello, Moment::kBefore));
  EXPECT_FALSE(second.IsHit(Type::kHello, Moment::kBefore));
}

}  // namespace
}  // namespace weightbroker
