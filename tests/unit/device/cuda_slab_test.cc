#include "common/memory/cuda_slab.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>

#include "absl/strings/str_cat.h"
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

constexpr int64_t kMiB = 1 << 20;

void* Host(CudaDevicePtr address) { return reinterpret_cast<void*>(address); }

class CudaSlabTest : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(cuda_.live_objects(), 0) << cuda_.DescribeLive(); }

  CudaContext Context(CudaDevice device = 0) { return *CudaContext::Retain(cuda_, device); }

  FakeCudaDriver cuda_{{{.uuid = FakeGpuUuid(1), .total_bytes = 64 * kMiB}, {.uuid = FakeGpuUuid(2)}}};
};

TEST_F(CudaSlabTest, VmmMemoryIsRoundedUpToTheGranularity) {
  const auto memory = CudaVmmMemory::Create(Context(), 2 * kMiB + 1);
  ASSERT_THAT(memory, IsOk());
  EXPECT_EQ(memory->size_bytes(), 4 * kMiB);
  EXPECT_EQ(cuda_.used_bytes(), 4 * kMiB);
}

TEST_F(CudaSlabTest, VmmMemoryThatIsOutSaysNeedAndHaveAndTheGpu) {
  EXPECT_THAT(CudaVmmMemory::Create(Context(), 65 * kMiB),
              AllOf(StatusIs(Reason::kMemoryExhausted, HasSubstr(FakeGpuUuid(1))),
                    HasMetadata("need_bytes", std::to_string(66 * kMiB)),
                    HasMetadata("have_bytes", std::to_string(64 * kMiB)), HasMetadata("device_uuid", FakeGpuUuid(1))));
}

TEST_F(CudaSlabTest, CuMemCreateThatIsRefusedIsNamed) {
  cuda_.Fail("cuMemCreate", kCudaNotPermitted);
  EXPECT_THAT(CudaVmmMemory::Create(Context(), kMiB),
              AllOf(StatusIs(Reason::kCudaError, HasSubstr("cuMemCreate failed with CUDA_ERROR_NOT_PERMITTED")),
                    HasMetadata("call", "cuMemCreate"), HasMetadata("device_uuid", FakeGpuUuid(1))));
}

TEST_F(CudaSlabTest, ADeviceWithoutDescriptorsIsRefusedNamingWhatItLacks) {
  FakeCudaDriver old({{.uuid = FakeGpuUuid(5), .has_posix_fds = false}});
  EXPECT_THAT(CheckCudaVmmSupport(old, 0), AllOf(StatusIs(Reason::kDeviceUnsupported, HasSubstr("file descriptors")),
                                                 HasMetadata("device_uuid", FakeGpuUuid(5))));
  EXPECT_THAT(CheckCudaVmmSupport(cuda_, 0), IsOk());
}

TEST_F(CudaSlabTest, VmmMemoryLivesOnThroughItsDescriptorWithoutAnyContext) {
  UniqueFd fd;
  {
    const CudaContext context = Context();
    auto memory = CudaVmmMemory::Create(context, 2 * kMiB);
    auto range = CudaReservation::Reserve(context, 2 * kMiB);
    ASSERT_THAT(range, IsOk());
    ASSERT_THAT(range->Map(0, *memory, CudaAccess::kReadWrite), IsOk());
    std::memcpy(Host(range->address()), "weights", 8);
    auto exported = memory->Export();
    ASSERT_THAT(exported, IsOk());
    fd = *std::move(exported);
  }
  ASSERT_EQ(cuda_.live_objects(), 0) << cuda_.DescribeLive();
  const CudaContext context = Context();
  const auto imported = CudaVmmMemory::Import(context, fd.get(), 2 * kMiB);
  ASSERT_THAT(imported, IsOk());
  auto range = CudaReservation::Reserve(context, 2 * kMiB);
  ASSERT_THAT(range->Map(0, *imported, CudaAccess::kRead), IsOk());
  EXPECT_STREQ(static_cast<const char*>(Host(range->address())), "weights");
}

TEST_F(CudaSlabTest, ADescriptorIsClosedInProgramsThatAreStarted) {
  const auto memory = CudaVmmMemory::Create(Context(), kMiB);
  const auto fd = memory->Export();
  ASSERT_THAT(fd, IsOk());
  EXPECT_EQ(fcntl(fd->get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST_F(CudaSlabTest, AWriteThroughAReadOnlyMappingKillsTheWriter) {
  const CudaContext context = Context();
  const auto memory = CudaVmmMemory::Create(context, kMiB);
  auto range = CudaReservation::Reserve(context, memory->size_bytes());
  ASSERT_THAT(range->Map(0, *memory, CudaAccess::kRead), IsOk());
  EXPECT_DEATH(std::memset(Host(range->address()), 1, 1), "");
}

TEST_F(CudaSlabTest, MemoryOnAnotherGpuIsRefusedNamingBoth) {
  const auto memory = CudaVmmMemory::Create(Context(1), kMiB);
  const auto fd = memory->Export();
  EXPECT_THAT(CudaVmmMemory::Import(Context(0), fd->get(), memory->size_bytes()),
              AllOf(StatusIs(Reason::kDeviceMismatch, AllOf(HasSubstr(FakeGpuUuid(1)), HasSubstr(FakeGpuUuid(2)))),
                    HasMetadata("device_uuid", FakeGpuUuid(2)), HasMetadata("wanted_uuid", FakeGpuUuid(1))));
}

TEST_F(CudaSlabTest, MemoryOnAGpuThatTheProcessDoesNotSeeIsRefusedThoughTheDriverWouldMapIt) {
  const auto memory = CudaVmmMemory::Create(Context(0), kMiB);
  const auto fd = memory->Export();
  FakeCudaDriver engine({{.uuid = FakeGpuUuid(1), .visible = false}, {.uuid = FakeGpuUuid(2)}});
  const auto context = CudaContext::Retain(engine, 0);
  EXPECT_THAT(CudaVmmMemory::Import(*context, fd->get(), memory->size_bytes()),
              StatusIs(Reason::kDeviceMismatch, HasSubstr("does not see")));
}

TEST_F(CudaSlabTest, ADescriptorThatIsNoGpuMemoryIsRefused) {
  const UniqueFd file(open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_THAT(CudaVmmMemory::Import(Context(), file.get(), kMiB),
              StatusIs(Reason::kCudaError, HasSubstr("cuMemImportFromShareableHandle")));
}

TEST_F(CudaSlabTest, AReservationTakesSlabsSideBySideAndRefusesOneThatDoesNotFit) {
  const CudaContext context = Context();
  const auto first = CudaVmmMemory::Create(context, 2 * kMiB);
  const auto second = CudaVmmMemory::Create(context, 4 * kMiB);
  auto range = CudaReservation::Reserve(context, 6 * kMiB);
  EXPECT_THAT(range->Map(0, *first, CudaAccess::kReadWrite), IsOk());
  EXPECT_THAT(range->Map(4 * kMiB, *second, CudaAccess::kReadWrite), StatusIs(Reason::kInvalidArgument));
  EXPECT_THAT(range->Map(2 * kMiB, *second, CudaAccess::kReadWrite), IsOk());
}

TEST_F(CudaSlabTest, AMappingThatFailsLeavesNothingBehind) {
  for (const char* call : {"cuMemMap", "cuMemSetAccess"}) {
    const CudaContext context = Context();
    const auto memory = CudaVmmMemory::Create(context, kMiB);
    auto range = CudaReservation::Reserve(context, memory->size_bytes());
    cuda_.Fail(call, kCudaMapFailed);
    EXPECT_THAT(range->Map(0, *memory, CudaAccess::kRead), StatusIs(Reason::kCudaError, HasSubstr(call)));
    cuda_.StopFailing(call);
  }
}

TEST_F(CudaSlabTest, IpcMemoryIsRoundedToTwoMebibytesAndOpensByItsHandle) {
  const CudaContext context = Context();
  const auto memory = CudaIpcMemory::Allocate(context, 100);
  ASSERT_THAT(memory, IsOk());
  EXPECT_EQ(memory->size_bytes(), kCudaIpcGranularityBytes);
  std::memcpy(Host(memory->address()), "weights", 8);
  const auto handle = memory->Export();
  ASSERT_THAT(handle, IsOk());
  const auto mapping = CudaIpcMapping::Open(context, *handle, kCudaIpcGranularityBytes);
  ASSERT_THAT(mapping, IsOk());
  EXPECT_STREQ(static_cast<const char*>(Host(mapping->address())), "weights");
}

TEST_F(CudaSlabTest, AHandleWhoseExporterHasEndedIsStale) {
  const CudaContext context = Context();
  absl::StatusOr<CudaIpcHandle> handle;
  {
    const auto memory = CudaIpcMemory::Allocate(context, kMiB);
    handle = memory->Export();
  }
  EXPECT_THAT(CudaIpcMapping::Open(context, *handle, kMiB), StatusIs(Reason::kHandleStale, HasSubstr("has ended")));
}

TEST_F(CudaSlabTest, IpcMemoryThatIsShorterThanIsSaidIsRefusedNamingBothAndClosed) {
  const CudaContext context = Context();
  const auto memory = CudaIpcMemory::Allocate(context, kMiB);
  const int live = cuda_.live_objects();
  for (const int64_t said_bytes : {kCudaIpcGranularityBytes + 1, int64_t{-1}}) {
    EXPECT_THAT(CudaIpcMapping::Open(context, *memory->Export(), said_bytes),
                AllOf(StatusIs(Reason::kProtocolError), HasMetadata("said_bytes", absl::StrCat(said_bytes)),
                      HasMetadata("found_bytes", absl::StrCat(kCudaIpcGranularityBytes))));
  }
  EXPECT_EQ(cuda_.live_objects(), live) << cuda_.DescribeLive();
}

TEST_F(CudaSlabTest, IpcMemoryWhoseSizeTheDriverDoesNotSayIsRefused) {
  const CudaContext context = Context();
  const auto memory = CudaIpcMemory::Allocate(context, kMiB);
  cuda_.Fail("cuMemGetAddressRange", kCudaNotFound);
  EXPECT_THAT(CudaIpcMapping::Open(context, *memory->Export(), kMiB),
              StatusIs(Reason::kCudaError, HasSubstr("cuMemGetAddressRange")));
}

TEST_F(CudaSlabTest, EveryObjectLeavesTheCurrentContextAlone) {
  const CudaContext context = Context(0);
  const CudaContext engine = Context(1);
  const CudaScope current(engine);
  {
    const auto memory = CudaVmmMemory::Create(context, kMiB);
    auto range = CudaReservation::Reserve(context, memory->size_bytes());
    ASSERT_THAT(range->Map(0, *memory, CudaAccess::kRead), IsOk());
    const auto ipc = CudaIpcMemory::Allocate(context, kMiB);
    const auto mapping = CudaIpcMapping::Open(context, *ipc->Export(), kMiB);
  }
  CudaContextHandle now = nullptr;
  cuda_.CtxGetCurrent(&now);
  EXPECT_EQ(now, engine.handle());
}

}  // namespace
}  // namespace weightbroker
