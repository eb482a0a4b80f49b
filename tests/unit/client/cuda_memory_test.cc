#include "client/src/cuda_memory.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "client/src/cuda_verify.h"
#include "common/memory/digest.h"
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

constexpr int64_t kSlabBytes = FakeCudaDriver::kGranularityBytes;

std::byte* HostPointer(CudaDevicePtr address) { return reinterpret_cast<std::byte*>(address); }

// A slab as another process would have exported it, filled with `value`.
UniqueFd ExportSlab(const CudaContext& context, unsigned char value) {
  auto memory = CudaVmmMemory::Create(context, kSlabBytes);
  EXPECT_THAT(memory, IsOk());
  auto range = CudaReservation::Reserve(context, kSlabBytes);
  EXPECT_THAT(range, IsOk());
  EXPECT_THAT(range->Map(0, *memory, CudaAccess::kReadWrite), IsOk());
  memset(HostPointer(range->address()), value, kSlabBytes);
  return *memory->Export();
}

Tensor View(std::string_view name, const std::byte* data, int64_t size_bytes, const std::string& stated) {
  Tensor tensor;
  tensor.name = name;
  tensor.data = data;
  tensor.size_bytes = size_bytes;
  const Digest digest = ComputeDigest({reinterpret_cast<const std::byte*>(stated.data()), stated.size()});
  memcpy(tensor.digest.data(), digest.data(), digest.size());
  return tensor;
}

class CudaMemoryTest : public ::testing::Test {
 protected:
  CudaMemoryTest() : fds_{} {
    fds_.push_back(ExportSlab(context_, 'a'));
    fds_.push_back(ExportSlab(context_, 'b'));
  }

  std::vector<VmmSlab> Slabs() const { return {{fds_[0].get(), kSlabBytes}, {fds_[1].get(), kSlabBytes}}; }

  FakeCudaDriver cuda_{{FakeGpu{.uuid = FakeGpuUuid(1)}, FakeGpu{.uuid = FakeGpuUuid(2)}}};
  CudaContext context_ = *CudaContext::Retain(cuda_, 0);
  std::vector<UniqueFd> fds_;
};

TEST_F(CudaMemoryTest, IsUnmappedOnceTheGpuHasDoneWhatItWasAskedFor) {
  auto memory = CudaMemory::Import(context_, FakeGpuUuid(1), Slabs());
  ASSERT_THAT(memory, IsOk());
  CudaStream stream = nullptr;
  const CudaScope current(context_);
  ASSERT_EQ(cuda_.StreamCreate(0, &stream), kCudaSuccess);
  char read = 0;
  const auto from = reinterpret_cast<CudaDevicePtr>((*memory)->slabs()[0].data);
  ASSERT_EQ(cuda_.MemcpyDtoHAsync(&read, from, 1, stream), kCudaSuccess);

  memory->reset();

  EXPECT_EQ(read, 'a');
  ASSERT_EQ(cuda_.StreamDestroy(stream), kCudaSuccess);
}

TEST_F(CudaMemoryTest, ShowsAllSlabsSideBySideOnTheEnginesGpu) {
  const auto memory = CudaMemory::Import(context_, FakeGpuUuid(1), Slabs());

  ASSERT_THAT(memory, IsOk());
  const std::vector<SlabView>& slabs = (*memory)->slabs();
  ASSERT_EQ(slabs.size(), 2u);
  EXPECT_EQ(slabs[0].data[0], std::byte{'a'});
  EXPECT_EQ(slabs[1].data[kSlabBytes - 1], std::byte{'b'});
  EXPECT_EQ(slabs[1].data, slabs[0].data + kSlabBytes) << "one reservation";
  EXPECT_EQ((*memory)->device().kind, DeviceKind::kCuda);
  EXPECT_EQ((*memory)->device().ordinal, 0);
  EXPECT_EQ((*memory)->device().uuid, FakeGpuUuid(1));
}

TEST_F(CudaMemoryTest, NeedsNoDescriptorOnceItIsMapped) {
  auto memory = CudaMemory::Import(context_, FakeGpuUuid(1), Slabs());
  ASSERT_THAT(memory, IsOk());

  fds_.clear();

  EXPECT_EQ((*memory)->slabs()[0].data[17], std::byte{'a'});
}

TEST_F(CudaMemoryTest, GivesEverythingBackAtItsEnd) {
  const int before = cuda_.live_objects();

  CudaMemory::Import(context_, FakeGpuUuid(1), Slabs()).value().reset();

  EXPECT_EQ(cuda_.live_objects(), before) << cuda_.DescribeLive();
}

TEST_F(CudaMemoryTest, LeavesNothingBehindWhateverFails) {
  const int before = cuda_.live_objects();
  for (const char* call : {"cuMemImportFromShareableHandle", "cuMemGetAllocationPropertiesFromHandle",
                           "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"}) {
    cuda_.Fail(call, kCudaInvalidValue);
    EXPECT_THAT(CudaMemory::Import(context_, FakeGpuUuid(1), Slabs()), StatusIs(Reason::kCudaError, HasSubstr(call)));
    cuda_.StopFailing(call);
    EXPECT_EQ(cuda_.live_objects(), before) << call << ": " << cuda_.DescribeLive();
  }
}

TEST_F(CudaMemoryTest, LeavesTheCallersContextAsItWas) {
  const CudaContext other = *CudaContext::Retain(cuda_, 1);
  const CudaScope current(other);

  {
    const auto memory = CudaMemory::Import(context_, FakeGpuUuid(1), Slabs());
    ASSERT_THAT(memory, IsOk());
    CudaContextHandle while_mapped = nullptr;
    ASSERT_EQ(cuda_.CtxGetCurrent(&while_mapped), kCudaSuccess);
    EXPECT_EQ(while_mapped, other.handle());
  }

  CudaContextHandle after = nullptr;
  ASSERT_EQ(cuda_.CtxGetCurrent(&after), kCudaSuccess);
  EXPECT_EQ(after, other.handle());
}

TEST_F(CudaMemoryTest, RefusesMemoryOfAnotherGpuNamingBoth) {
  const CudaContext engine = *CudaContext::Retain(cuda_, 1);

  EXPECT_THAT(CudaMemory::Import(engine, FakeGpuUuid(2), Slabs()),
              AllOf(StatusIs(Reason::kDeviceMismatch, HasSubstr(FakeGpuUuid(1))),
                    HasMetadata("device_uuid", FakeGpuUuid(1)), HasMetadata("wanted_uuid", FakeGpuUuid(2))));
}

TEST_F(CudaMemoryTest, RefusesADescriptorThatIsNoGpuMemory) {
  const UniqueFd file(open("/proc/self/exe", O_RDONLY | O_CLOEXEC));

  EXPECT_THAT(CudaMemory::Import(context_, FakeGpuUuid(1), std::vector<VmmSlab>{{file.get(), kSlabBytes}}),
              StatusIs(Reason::kCudaError));
}

TEST_F(CudaMemoryTest, OpensSlabsByTheirIpcHandles) {
  auto allocated = CudaIpcMemory::Allocate(context_, kSlabBytes);
  ASSERT_THAT(allocated, IsOk());
  memset(HostPointer(allocated->address()), 'c', kSlabBytes);
  const int before = cuda_.live_objects();

  auto memory = CudaMemory::Open(context_, FakeGpuUuid(1), std::vector<IpcSlab>{{*allocated->Export(), kSlabBytes}});

  ASSERT_THAT(memory, IsOk());
  EXPECT_EQ((*memory)->slabs()[0].data[5], std::byte{'c'});
  memory->reset();
  EXPECT_EQ(cuda_.live_objects(), before) << cuda_.DescribeLive();
}

TEST_F(CudaMemoryTest, SaysThatAnIpcHandleIsStale) {
  CudaIpcHandle handle;
  handle.fill(std::byte{7});

  EXPECT_THAT(CudaMemory::Open(context_, FakeGpuUuid(1), std::vector<IpcSlab>{{handle, kSlabBytes}}),
              StatusIs(Reason::kHandleStale));
}

TEST_F(CudaMemoryTest, VerifiesOnTheGpuAndByCopying) {
  const auto memory = CudaMemory::Import(context_, FakeGpuUuid(1), Slabs());
  ASSERT_THAT(memory, IsOk());
  const std::byte* data = (*memory)->slabs()[0].data;
  Tensor alias = View("alias", data, 100, "of another tensor, so not looked at");
  alias.alias_of = "right";
  const std::vector<Tensor> right = {alias, View("empty", nullptr, 0, ""),
                                     View("right", data, 101, std::string(101, 'a'))};
  const std::vector<Tensor> wrong = {right[2], View("wrong", data + 256, 64, std::string(64, 'b'))};

  EXPECT_THAT(VerifyByCopying(context_, right), IsOk());
  EXPECT_THAT(VerifyByCopying(context_, wrong),
              AllOf(StatusIs(Reason::kDigestMismatch, HasSubstr("\"wrong\"")), HasMetadata("tensor", "wrong")));
  EXPECT_THAT((*memory)->Verify(right, 1), IsOk());
  EXPECT_THAT((*memory)->Verify(wrong, 1), HasMetadata("tensor", "wrong"));
}

TEST_F(CudaMemoryTest, SaysThatTheGpuFailedWhileItWasVerified) {
  const auto memory = CudaMemory::Import(context_, FakeGpuUuid(1), Slabs());
  ASSERT_THAT(memory, IsOk());
  const std::vector<Tensor> tensors = {View("a", (*memory)->slabs()[0].data, 8, std::string(8, 'a'))};
  cuda_.BreakContext(kCudaIllegalAddress);

  EXPECT_THAT(VerifyByCopying(context_, tensors), StatusIs(Reason::kCudaError));
}

}  // namespace
}  // namespace weightbroker::client
