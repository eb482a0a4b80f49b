// The driver, GPU memory and kernels on a real GPU: what the unit tests show with a driver in host memory.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>

#include "common/base/status_macros.h"
#include "common/device/gpu_digest.h"
#include "common/load/cuda_destination.h"
#include "common/load/host_destination.h"
#include "common/memory/cuda_slab.h"
#include "common/memory/gpu_fd.h"
#include "tests/gpu/gpu_fixture.h"
#include "tests/support/status_matchers.h"
#include "tests/support/transform_case.h"

namespace weightbroker::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int64_t kGiB = int64_t{1} << 30;

class GpuMemoryTest : public GpuTest {
 protected:
  static CudaDriver& Cuda() { return **LoadCudaDriver(); }

  static CudaContext Context() {
    auto context = CudaContext::Retain(Cuda(), FindCudaDevice(Cuda(), Uuid()).value());
    EXPECT_THAT(context, IsOk());
    return *std::move(context);
  }

  static void Upload(const CudaContext& context, CudaDevicePtr to, const void* from, size_t size_bytes) {
    const CudaScope current(context);
    ASSERT_EQ(Cuda().MemcpyHtoDAsync(to, from, size_bytes, nullptr), kCudaSuccess);
    ASSERT_EQ(Cuda().CtxSynchronize(), kCudaSuccess);
  }

  static std::vector<std::byte> Download(const CudaContext& context, CudaDevicePtr from, int64_t size_bytes) {
    std::vector<std::byte> bytes(static_cast<size_t>(size_bytes));
    const CudaScope current(context);
    EXPECT_EQ(Cuda().MemcpyDtoHAsync(bytes.data(), from, bytes.size(), nullptr), kCudaSuccess);
    EXPECT_EQ(Cuda().CtxSynchronize(), kCudaSuccess);
    return bytes;
  }

  static std::string NameOfFd(int fd) {
    char target[256] = "";
    const ssize_t size = readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), target, sizeof(target) - 1);
    return std::string(target, static_cast<size_t>(std::max<ssize_t>(0, size)));
  }
};

TEST_F(GpuMemoryTest, NvmlAndCudaKnowTheSameGpusByTheirUuids) {
  REQUIRE_GPUS(1);
  ASSERT_THAT(LoadCudaDriver(), IsOk());
  for (const GpuInfo& gpu : Gpus()) {
    const auto device = FindCudaDevice(Cuda(), gpu.uuid);
    ASSERT_THAT(device, IsOk());
    int major = 0;
    ASSERT_EQ(Cuda().DeviceGetAttribute(*device, kCudaAttributeComputeCapabilityMajor, &major), kCudaSuccess);
    EXPECT_EQ(major, gpu.compute_major);
    EXPECT_THAT(CheckCudaVmmSupport(Cuda(), *device), IsOk());
    std::printf("%s is NVML's %d and CUDA's %d: %s, %lld MiB, %lld MiB free\n", gpu.uuid.c_str(), gpu.ordinal, *device,
                gpu.name.c_str(), static_cast<long long>(gpu.total_bytes / kMiB),
                static_cast<long long>(gpu.free_bytes / kMiB));
  }
}

TEST_F(GpuMemoryTest, DigestsAreThoseOfTheCpu) {
  REQUIRE_GPUS(1);
  const CudaContext context = Context();
  const std::vector<int64_t> sizes = {0,    1,       7,       8,       9,          255, 4095,
                                      4096, 262'143, 262'144, 262'145, 10'000'001, 0,   123'456};
  std::vector<std::byte> bytes(64 << 20);
  std::mt19937_64 random(3);
  for (size_t i = 0; i < bytes.size(); i += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, sizeof(word));
  }
  const auto memory = CudaIpcMemory::Allocate(context, static_cast<int64_t>(bytes.size()));
  ASSERT_THAT(memory, IsOk());
  ASSERT_NO_FATAL_FAILURE(Upload(context, memory->address(), bytes.data(), bytes.size()));
  std::vector<GpuRange> ranges;
  std::vector<Digest> wanted;
  int64_t at = 8;  // no multiple of 16
  for (const int64_t size : sizes) {
    ranges.push_back({memory->address() + static_cast<CudaDevicePtr>(at), size});
    wanted.push_back(ComputeDigest(std::span(bytes).subspan(static_cast<size_t>(at), static_cast<size_t>(size))));
    at += (size + 7) / 8 * 8;
  }
  const auto digester = GpuDigester::Create(context);
  ASSERT_THAT(digester, IsOk());
  const auto digests = digester->Compute(ranges);
  ASSERT_THAT(digests, IsOk());
  for (size_t i = 0; i < sizes.size(); ++i) {
    EXPECT_EQ(DigestHex((*digests)[i]), DigestHex(wanted[i])) << "of " << sizes[i] << " bytes";
  }
}

TEST_F(GpuMemoryTest, DigestsOfManyTensorsAreTakenAtTheSpeedOfMemory) {
  REQUIRE_GPUS(1);
  const CudaContext context = Context();
  const int64_t size_bytes = std::min<int64_t>(16 * kGiB, FreeBytes() / 2 / kGiB * kGiB);
  const auto memory = CudaVmmMemory::Create(context, size_bytes);
  ASSERT_THAT(memory, IsOk());
  auto range = CudaReservation::Reserve(context, memory->size_bytes());
  ASSERT_THAT(range, IsOk());
  ASSERT_THAT(range->Map(0, *memory, CudaAccess::kReadWrite), IsOk());
  constexpr int64_t kTensors = 6000;
  const int64_t tensor_bytes = size_bytes / kTensors / 256 * 256;
  std::vector<GpuRange> ranges;
  for (int64_t i = 0; i < kTensors; ++i) {
    ranges.push_back({range->address() + static_cast<CudaDevicePtr>(i * tensor_bytes), tensor_bytes});
  }
  const auto digester = GpuDigester::Create(context);
  ASSERT_THAT(digester, IsOk());
  ASSERT_THAT(digester->Compute(ranges), IsOk());
  const auto started = std::chrono::steady_clock::now();
  ASSERT_THAT(digester->Compute(ranges), IsOk());
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  std::printf("digests of %lld tensors, %.1f GiB in all: %.1f ms, %.0f GB/s\n", static_cast<long long>(kTensors),
              static_cast<double>(size_bytes) / kGiB, seconds * 1e3,
              static_cast<double>(kTensors * tensor_bytes) / seconds / 1e9);
}

TEST_F(GpuMemoryTest, LoadsHaveTheBytesAndDigestsOfHostMemoryForEveryTransform) {
  REQUIRE_GPUS(1);
  const TransformCase made = TransformCase::Make();
  std::vector<HostSlab> slabs;
  slabs.push_back(HostSlab::Create(made.plan.slab_bytes[0]).value());
  const auto on_host = MakeHostDestination(made.plan, slabs, FillMethod::kCopy);
  ASSERT_THAT(on_host->Store(made.chunk, made.transfers), IsOk());
  const auto host_digests = on_host->Finish();
  ASSERT_THAT(host_digests, IsOk());

  const CudaContext context = Context();
  const auto memory = CudaVmmMemory::Create(context, made.plan.slab_bytes[0]);
  ASSERT_THAT(memory, IsOk());
  auto range = CudaReservation::Reserve(context, memory->size_bytes());
  ASSERT_THAT(range, IsOk());
  ASSERT_THAT(range->Map(0, *memory, CudaAccess::kReadWrite), IsOk());
  CudaBuffers buffers;
  buffers.Pin(context);
  const auto buffer = buffers.Allocate(static_cast<int64_t>(made.chunk.size()));
  ASSERT_THAT(buffer, IsOk());
  std::copy(made.chunk.begin(), made.chunk.end(), buffer->begin());
  const auto on_gpu = MakeCudaDestination(made.plan, {{range->address(), memory->size_bytes()}}, context,
                                          [&] { return range->SetAccess(CudaAccess::kRead); });
  ASSERT_THAT(on_gpu, IsOk());
  ASSERT_THAT((*on_gpu)->Store(*buffer, made.transfers), IsOk());
  ASSERT_THAT((*on_gpu)->Release(*buffer), IsOk());
  const auto gpu_digests = (*on_gpu)->Finish();
  ASSERT_THAT(gpu_digests, IsOk());

  const std::vector<std::byte> bytes = Download(context, range->address(), made.plan.slab_bytes[0]);
  for (size_t i = 0; i < made.plan.tensors.size(); ++i) {
    const TensorPlacement& tensor = made.plan.tensors[i];
    const auto offset = static_cast<size_t>(tensor.slab_offset_bytes);
    const auto size = static_cast<size_t>(tensor.size_bytes);
    EXPECT_EQ(std::memcmp(bytes.data() + offset, slabs[0].writable_bytes().data() + offset, size), 0) << tensor.name;
    EXPECT_EQ(DigestHex((*gpu_digests)[i]), DigestHex((*host_digests)[i])) << tensor.name;
  }
}

TEST_F(GpuMemoryTest, ADescriptorIsTheDriversWithoutCudaHavingToSaySo) {
  REQUIRE_GPUS(1);
  const auto memory = CudaVmmMemory::Create(Context(), 2 * kMiB);
  ASSERT_THAT(memory, IsOk());
  const auto fd = memory->Export();
  ASSERT_THAT(fd, IsOk());
  struct stat status {};
  ASSERT_EQ(fstat(fd->get(), &status), 0);
  std::printf("a descriptor of GPU memory is %s, mode %o, device %u:%u\n", NameOfFd(fd->get()).c_str(), status.st_mode,
              major(status.st_rdev), minor(status.st_rdev));
  EXPECT_THAT(CheckGpuMemoryFd(fd->get()), IsOk());
  EXPECT_EQ(fcntl(fd->get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST_F(GpuMemoryTest, VmmMemoryStaysWithItsDescriptorWhenEveryContextHasGoneAndGoesWithIt) {
  REQUIRE_GPUS(1);
  const int64_t before = FreeBytes();
  UniqueFd fd;
  int64_t size_bytes = 0;
  {
    const CudaContext context = Context();
    const auto memory = CudaVmmMemory::Create(context, kGiB);
    ASSERT_THAT(memory, IsOk());
    size_bytes = memory->size_bytes();
    auto range = CudaReservation::Reserve(context, size_bytes);
    ASSERT_THAT(range->Map(0, *memory, CudaAccess::kReadWrite), IsOk());
    ASSERT_NO_FATAL_FAILURE(Upload(context, range->address(), "weights", 8));
    auto exported = memory->Export();
    ASSERT_THAT(exported, IsOk());
    fd = *std::move(exported);
  }
  EXPECT_LE(FreeBytes(), before - size_bytes);
  EXPECT_GE(FreeBytes(), before - size_bytes - 16 * kMiB) << "a context is left";
  {
    const CudaContext context = Context();
    const auto memory = CudaVmmMemory::Import(context, fd.get(), size_bytes);
    ASSERT_THAT(memory, IsOk());
    auto range = CudaReservation::Reserve(context, size_bytes);
    ASSERT_THAT(range->Map(0, *memory, CudaAccess::kRead), IsOk());
    EXPECT_STREQ(reinterpret_cast<const char*>(Download(context, range->address(), 8).data()), "weights");
  }
  fd.reset();
  EXPECT_TRUE(ComesBackTo(before)) << "before " << before << ", now " << FreeBytes();
}

TEST_F(GpuMemoryTest, MoreThanThereIsIsRefusedWithNeedAndHave) {
  REQUIRE_GPUS(1);
  const int64_t need = Gpus()[0].total_bytes + kGiB;
  const CudaContext context = Context();
  EXPECT_THAT(CudaVmmMemory::Create(context, need),
              AllOf(StatusIs(Reason::kMemoryExhausted, HasSubstr(Uuid())), HasMetadata("device_uuid", Uuid())));
  EXPECT_THAT(CudaIpcMemory::Allocate(context, need), StatusIs(Reason::kMemoryExhausted, HasSubstr(Uuid())));
}

TEST_F(GpuMemoryTest, WhatIsNoHandleIsRefusedByTheDriver) {
  REQUIRE_GPUS(1);
  const CudaContext context = Context();
  const UniqueFd file(open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_THAT(CudaVmmMemory::Import(context, file.get(), 2 * kMiB),
              StatusIs(Reason::kCudaError, HasSubstr("cuMemImportFromShareableHandle")));
  EXPECT_THAT(CudaIpcMapping::Open(context, CudaIpcHandle{}, kMiB),
              AnyOf(StatusIs(Reason::kCudaError), StatusIs(Reason::kHandleStale)));
}

}  // namespace
}  // namespace weightbroker::testing
