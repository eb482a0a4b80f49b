// NVML as the service calls it, with a library of its name that has two GPUs.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/device/gpu_inventory.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using testing::IsOk;
using ::testing::SizeIs;
using testing::StatusIs;

constexpr char kFirst[] = "GPU-00000001-0000-0000-0000-000000000000";
constexpr char kSecond[] = "GPU-00000002-0000-0000-0000-000000000000";

class NvmlTest : public ::testing::Test {
 protected:
  NvmlTest() : nvml_(OpenNvml().value()) {}

  const std::unique_ptr<GpuInventory> nvml_;
};

TEST_F(NvmlTest, DescribesEveryGpu) {
  const auto gpus = nvml_->List();
  ASSERT_THAT(gpus, IsOk());
  ASSERT_THAT(*gpus, SizeIs(2));
  const GpuInfo& gpu = (*gpus)[0];
  EXPECT_EQ(gpu.ordinal, 0);
  EXPECT_EQ(gpu.uuid, kFirst);
  EXPECT_EQ(gpu.name, "NVIDIA Pretended");
  EXPECT_EQ(gpu.compute_major, 9);
  EXPECT_EQ(gpu.compute_minor, 0);
  EXPECT_EQ(gpu.total_bytes, int64_t{8} << 30);
  EXPECT_EQ(gpu.free_bytes, int64_t{6} << 30);
  EXPECT_EQ(nvml_->driver_version(), "580.00.1");
}

TEST_F(NvmlTest, KnowsAPartitionedGpuFromOneThatCannotBe) {
  const auto gpus = nvml_->List();
  ASSERT_THAT(gpus, IsOk());
  EXPECT_FALSE((*gpus)[0].mig_enabled);
  EXPECT_TRUE((*gpus)[1].mig_enabled);
}

TEST_F(NvmlTest, FindsAGpuByItsUuidBeforeAnybodyHasListedThem) {
  const auto memory = nvml_->Memory(kSecond);
  ASSERT_THAT(memory, IsOk());
  EXPECT_EQ(memory->free_bytes, int64_t{6} << 30);
  EXPECT_THAT(nvml_->Memory("GPU-f"), StatusIs(Reason::kDeviceUnknown, HasSubstr("GPU-f")));
}

TEST_F(NvmlTest, ListsMoreProcessesThanItHadRoomFor) {
  const auto processes = nvml_->Processes(kFirst);
  ASSERT_THAT(processes, IsOk());
  ASSERT_THAT(*processes, SizeIs(70));
  EXPECT_EQ((*processes)[0].pid, 1000);
  EXPECT_EQ((*processes)[0].used_bytes, -1);
  EXPECT_EQ((*processes)[69].used_bytes, int64_t{69} << 20);
  EXPECT_THAT(nvml_->Processes(kSecond).value(), SizeIs(0));
}

}  // namespace
}  // namespace weightbroker
