#include "common/device/gpu_inventory.h"

#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using testing::StatusIs;

TEST(Nvml, IsReportedAsUnavailableWhereThereIsNoneSayingWhatTheSystemSaid) {
  const auto inventory = OpenNvml();
  if (inventory.ok()) GTEST_SKIP() << "this machine has NVML";
  EXPECT_THAT(inventory, StatusIs(Reason::kGpuUnavailable, HasSubstr("no NVIDIA GPU can be found: ")));
}

TEST(DescribeHolders, NamesTheLargestFirstAndCountsTheRest) {
  const std::vector<GpuProcess> processes = {{10, 1 << 20}, {11, int64_t{3} << 30}, {12, -1}, {13, 2 << 20}};
  EXPECT_EQ(DescribeHolders(processes, 2), "pid 11 (3072 MiB), pid 13 (2 MiB), and 2 more");
  EXPECT_EQ(DescribeHolders(processes), "pid 11 (3072 MiB), pid 13 (2 MiB), pid 10 (1 MiB), pid 12");
}

TEST(DescribeHolders, SaysThatThereIsNone) { EXPECT_EQ(DescribeHolders({}), "no process is listed"); }

}  // namespace
}  // namespace weightbroker
