#include "client/src/engine_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/support/fake_cuda_driver.h"
#include "tests/support/status_matchers.h"

namespace weightbroker::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::weightbroker::testing::FakeCudaDriver;
using ::weightbroker::testing::FakeGpu;
using ::weightbroker::testing::FakeGpuUuid;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;

// Two GPUs in the order in which the process sees them, and one that it does not.
std::vector<FakeGpu> TwoOfThreeGpus() {
  FakeGpu hidden;
  hidden.uuid = FakeGpuUuid(3);
  hidden.visible = false;
  return {FakeGpu{.uuid = FakeGpuUuid(2)}, FakeGpu{.uuid = FakeGpuUuid(1)}, hidden};
}

TEST(FindEngineDevice, NeedsNoDriverForTheHost) {
  const auto engine = FindEngineDevice(-1);

  ASSERT_THAT(engine, IsOk());
  EXPECT_TRUE(engine->is_host());
}

TEST(FindEngineDevice, KnowsTheGpuByItsUuidWhateverItsNumber) {
  FakeCudaDriver cuda({FakeGpu{.uuid = FakeGpuUuid(2)}, FakeGpu{.uuid = FakeGpuUuid(1)}});

  const auto engine = FindEngineDevice(cuda, 1);

  ASSERT_THAT(engine, IsOk());
  EXPECT_EQ(engine->uuid, FakeGpuUuid(1));
  EXPECT_EQ(engine->device, 1);
  EXPECT_FALSE(engine->is_host());
}

TEST(FindEngineDevice, SaysWhichGpusThereAreWhereItIsNone) {
  FakeCudaDriver cuda({FakeGpu{.uuid = FakeGpuUuid(7)}});

  EXPECT_THAT(FindEngineDevice(cuda, 1),
              AllOf(StatusIs(Reason::kDeviceUnknown, HasSubstr(FakeGpuUuid(7))), HasMetadata("device", "cuda:1")));
  EXPECT_THAT(FindEngineDevice(cuda, -2), StatusIs(Reason::kDeviceUnknown));
}

TEST(FindEngineDevice, SaysWhatTheDriverSays) {
  FakeCudaDriver cuda;
  cuda.Fail("cuDeviceGetCount", kCudaNotInitialized);

  EXPECT_THAT(FindEngineDevice(cuda, 0), StatusIs(Reason::kCudaError, HasSubstr("cuDeviceGetCount")));
}

TEST(CheckLiesOn, PassesTheEnginesOwnDevice) {
  FakeCudaDriver cuda;

  EXPECT_THAT(CheckLiesOn(EngineDevice(), "host"), IsOk());
  EXPECT_THAT(CheckLiesOn(*FindEngineDevice(cuda, 0), FakeGpuUuid(1)), IsOk());
}

TEST(CheckLiesOn, NamesBothGpusAndWhereTheOtherIsSeen) {
  FakeCudaDriver cuda(TwoOfThreeGpus());
  const EngineDevice engine = *FindEngineDevice(cuda, 0);

  EXPECT_THAT(CheckLiesOn(engine, FakeGpuUuid(1)),
              AllOf(StatusIs(Reason::kDeviceMismatch, HasSubstr("cuda:1 here")),
                    HasMetadata("device_uuid", FakeGpuUuid(1)), HasMetadata("wanted_uuid", FakeGpuUuid(2))));
}

TEST(CheckLiesOn, SaysThatTheWeightsGpuIsInvisible) {
  FakeCudaDriver cuda(TwoOfThreeGpus());
  const EngineDevice engine = *FindEngineDevice(cuda, 0);

  EXPECT_THAT(CheckLiesOn(engine, FakeGpuUuid(3)),
              AllOf(StatusIs(Reason::kDeviceMismatch, HasSubstr("not visible to this process")),
                    HasMetadata("device_uuid", FakeGpuUuid(3)), HasMetadata("wanted_uuid", FakeGpuUuid(2))));
}

TEST(CheckLiesOn, TellsHostAndGpuApart) {
  FakeCudaDriver cuda;

  EXPECT_THAT(CheckLiesOn(EngineDevice(), FakeGpuUuid(1)), StatusIs(Reason::kDeviceMismatch, HasSubstr("cuda_device")));
  EXPECT_THAT(CheckLiesOn(*FindEngineDevice(cuda, 0), "host"),
              StatusIs(Reason::kDeviceMismatch, HasSubstr("host memory")));
}

}  // namespace
}  // namespace weightbroker::client
