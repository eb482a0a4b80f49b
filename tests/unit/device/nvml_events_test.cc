#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

#include "common/device/gpu_events.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using std::chrono::milliseconds;
using testing::IsOk;

constexpr char kFirstGpu[] = "GPU-00000001-0000-0000-0000-000000000000";
constexpr char kSecondGpu[] = "GPU-00000002-0000-0000-0000-000000000000";

TEST(NvmlEvents, AreThoseThatTheDriverReportsWithTheirGpu) {
  setenv("WEIGHTBROKER_TEST_XIDS", "79,0", 1);
  const auto events = OpenNvmlEvents();
  ASSERT_THAT(events, IsOk());

  const auto xid = (*events)->Wait(milliseconds(100));
  const auto ecc = (*events)->Wait(milliseconds(100));
  const auto nothing = (*events)->Wait(milliseconds(100));

  ASSERT_TRUE(xid.ok() && xid->has_value());
  EXPECT_EQ((*xid)->kind, GpuEvent::Kind::kXid);
  EXPECT_EQ((*xid)->xid, 79u);
  EXPECT_EQ((*xid)->uuid, kFirstGpu);
  ASSERT_TRUE(ecc.ok() && ecc->has_value());
  EXPECT_EQ((*ecc)->kind, GpuEvent::Kind::kDoubleBitEcc);
  ASSERT_THAT(nothing, IsOk());
  EXPECT_FALSE(nothing->has_value());
}

TEST(NvmlEvents, SayWhichGpusReportNone) {
  const auto events = OpenNvmlEvents();
  ASSERT_THAT(events, IsOk());
  EXPECT_EQ((*events)->unwatched(), kSecondGpu);
}

TEST(GpuEvents, MeanDamageUnlessAProgramsOwnFaultCausesThem) {
  for (const uint64_t xid : std::vector<uint64_t>{13, 31, 43, 45, 68, 109})
    EXPECT_FALSE(MeansDamage({.uuid = "", .xid = xid})) << xid;
  for (const uint64_t xid : std::vector<uint64_t>{48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 999}) {
    EXPECT_TRUE(MeansDamage({.uuid = "", .xid = xid})) << xid;
  }
  EXPECT_TRUE(MeansDamage({.kind = GpuEvent::Kind::kDoubleBitEcc, .uuid = ""}));
}

}  // namespace
}  // namespace weightbroker
