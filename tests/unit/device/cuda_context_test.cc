#include "common/device/cuda_context.h"

#include <gtest/gtest.h>

#include "tests/support/fake_cuda_driver.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using testing::FakeCudaDriver;
using testing::FakeGpuUuid;
using testing::HasMetadata;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;

TEST(FindCudaDevice, FindsAGpuByItsUuidWhateverItsOrdinal) {
  FakeCudaDriver cuda({{.uuid = FakeGpuUuid(7)}, {.uuid = FakeGpuUuid(3)}});
  EXPECT_EQ(FindCudaDevice(cuda, FakeGpuUuid(3)).value(), 1);
  EXPECT_EQ(FindCudaDevice(cuda, FakeGpuUuid(7)).value(), 0);
}

TEST(FindCudaDevice, RefusesAGpuThatTheProcessDoesNotSeeNamingThoseThatItDoes) {
  FakeCudaDriver cuda({{.uuid = FakeGpuUuid(1), .visible = false}, {.uuid = FakeGpuUuid(2)}});
  EXPECT_THAT(FindCudaDevice(cuda, FakeGpuUuid(1)),
              AllOf(StatusIs(Reason::kDeviceUnknown, HasSubstr("CUDA_VISIBLE_DEVICES")),
                    HasMetadata("devices", FakeGpuUuid(2))));
}

TEST(FindCudaDevice, RefusesAMigPartitionSayingWhy) {
  FakeCudaDriver cuda;
  EXPECT_THAT(FindCudaDevice(cuda, "MIG-1234"), StatusIs(Reason::kDeviceUnsupported, HasSubstr("no other process")));
}

TEST(CudaContext, IsReleasedWithItsLastCopy) {
  FakeCudaDriver cuda;
  {
    auto context = CudaContext::Retain(cuda, 0);
    ASSERT_THAT(context, IsOk());
    const CudaContext copy = *context;
    context = absl::CancelledError();
    EXPECT_EQ(cuda.live_objects(), 1);
  }
  EXPECT_EQ(cuda.live_objects(), 0) << cuda.DescribeLive();
}

TEST(CudaContext, SaysWhichCallFailed) {
  FakeCudaDriver cuda;
  cuda.Fail("cuDevicePrimaryCtxRetain", kCudaOutOfMemory);
  EXPECT_THAT(CudaContext::Retain(cuda, 0),
              StatusIs(Reason::kMemoryExhausted, HasSubstr("cuDevicePrimaryCtxRetain failed with")));
}

TEST(CudaScope, LeavesWhatWasCurrentBefore) {
  FakeCudaDriver cuda({{.uuid = FakeGpuUuid(1)}, {.uuid = FakeGpuUuid(2)}});
  const auto first = CudaContext::Retain(cuda, 0);
  const auto second = CudaContext::Retain(cuda, 1);
  const CudaScope outer(*first);
  {
    const CudaScope inner(*second);
    CudaDevice device = -1;
    ASSERT_EQ(cuda.CtxGetDevice(&device), kCudaSuccess);
    EXPECT_EQ(device, 1);
  }
  CudaDevice device = -1;
  ASSERT_EQ(cuda.CtxGetDevice(&device), kCudaSuccess);
  EXPECT_EQ(device, 0);
}

TEST(CudaScope, PopsNothingIfItCouldNotPush) {
  FakeCudaDriver cuda;
  const auto context = CudaContext::Retain(cuda, 0);
  const CudaScope outer(*context);
  cuda.Fail("cuCtxPushCurrent", kCudaInvalidContext);
  {
    const CudaScope inner(*context);
    EXPECT_THAT(inner.status(), StatusIs(Reason::kCudaError, HasSubstr("cuCtxPushCurrent")));
  }
  CudaContextHandle current = nullptr;
  cuda.CtxGetCurrent(&current);
  EXPECT_EQ(current, context->handle());
}

}  // namespace
}  // namespace weightbroker
