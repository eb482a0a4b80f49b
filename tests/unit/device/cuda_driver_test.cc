#include "common/device/cuda_driver.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "tests/support/status_matchers.h"

#if __has_include(<cuda.h>)
#include <cuda.h>
#endif

namespace weightbroker {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::StatusIs;

TEST(CudaDriver, IsReportedAsUnavailableWhereThereIsNoneSayingWhatTheSystemSaid) {
  const auto driver = LoadCudaDriver();
  if (driver.ok()) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_THAT(driver, StatusIs(Reason::kGpuUnavailable, AnyOf(HasSubstr("libcuda.so.1"), HasSubstr("cuInit"))));
}

TEST(CudaDriver, IsTheSameForEveryoneAndStaysUnavailable) {
  const auto first = LoadCudaDriver();
  const auto second = LoadCudaDriver();
  EXPECT_EQ(first.status(), second.status());
  if (first.ok()) {
    EXPECT_EQ(*first, *second);
  }
}

TEST(FormatGpuUuid, SpellsItAsNvidiaSmiDoes) {
  CudaUuid uuid;
  for (size_t i = 0; i < uuid.size(); ++i) uuid[i] = static_cast<uint8_t>(0xA0 + i);
  EXPECT_EQ(FormatGpuUuid(uuid), "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf");
}

#if __has_include(<cuda.h>)
TEST(CudaTypes, AreLaidOutAsInCudasOwnHeader) {
  static_assert(sizeof(CudaAllocationProp) == sizeof(CUmemAllocationProp));
  static_assert(offsetof(CudaAllocationProp, requested_handle_types) ==
                offsetof(CUmemAllocationProp, requestedHandleTypes));
  static_assert(offsetof(CudaAllocationProp, location) == offsetof(CUmemAllocationProp, location));
  static_assert(offsetof(CudaAllocationProp, win32_handle_meta_data) ==
                offsetof(CUmemAllocationProp, win32HandleMetaData));
  static_assert(offsetof(CudaAllocationProp, flags) == offsetof(CUmemAllocationProp, allocFlags));
  static_assert(sizeof(CudaMemLocation) == sizeof(CUmemLocation));
  static_assert(sizeof(CudaAccessDesc) == sizeof(CUmemAccessDesc));
  static_assert(offsetof(CudaAccessDesc, flags) == offsetof(CUmemAccessDesc, flags));
  static_assert(sizeof(CudaUuid) == sizeof(CUuuid));
  static_assert(sizeof(CudaIpcHandle) == sizeof(CUipcMemHandle));
  static_assert(sizeof(CudaDevicePtr) == sizeof(CUdeviceptr));
  static_assert(sizeof(CudaMemHandle) == sizeof(CUmemGenericAllocationHandle));
}

TEST(CudaConstants, AreThoseOfCudasOwnHeader) {
  EXPECT_EQ(kCudaOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(kCudaNoDevice, CUDA_ERROR_NO_DEVICE);
  EXPECT_EQ(kCudaInvalidDevice, CUDA_ERROR_INVALID_DEVICE);
  EXPECT_EQ(kCudaInvalidContext, CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(kCudaMapFailed, CUDA_ERROR_MAP_FAILED);
  EXPECT_EQ(kCudaInvalidHandle, CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(kCudaNotFound, CUDA_ERROR_NOT_FOUND);
  EXPECT_EQ(kCudaNotReady, CUDA_ERROR_NOT_READY);
  EXPECT_EQ(kCudaIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_EQ(kCudaNotPermitted, CUDA_ERROR_NOT_PERMITTED);
  EXPECT_EQ(kCudaNotSupported, CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(kCudaAttributeMultiprocessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  EXPECT_EQ(kCudaAttributeComputeCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  EXPECT_EQ(kCudaAttributeComputeCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  EXPECT_EQ(kCudaAttributeVirtualMemoryManagement, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
  EXPECT_EQ(kCudaAttributePosixFdHandles, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
  EXPECT_EQ(kCudaLocationDevice, CU_MEM_LOCATION_TYPE_DEVICE);
  EXPECT_EQ(kCudaAllocationPinned, CU_MEM_ALLOCATION_TYPE_PINNED);
  EXPECT_EQ(kCudaHandlePosixFd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  EXPECT_EQ(static_cast<int>(CudaAccess::kRead), CU_MEM_ACCESS_FLAGS_PROT_READ);
  EXPECT_EQ(static_cast<int>(CudaAccess::kReadWrite), CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  EXPECT_EQ(kCudaHostAllocPortable, static_cast<unsigned>(CU_MEMHOSTALLOC_PORTABLE));
  EXPECT_EQ(kCudaStreamNonBlocking, static_cast<unsigned>(CU_STREAM_NON_BLOCKING));
  EXPECT_EQ(kCudaEventDisableTiming, static_cast<unsigned>(CU_EVENT_DISABLE_TIMING));
  EXPECT_EQ(kCudaIpcLazyPeerAccess, static_cast<unsigned>(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  EXPECT_EQ(kCudaStreamDefault, static_cast<unsigned>(CU_STREAM_DEFAULT));
  EXPECT_EQ(kCudaMemoryHost, CU_MEMORYTYPE_HOST);
  EXPECT_EQ(kCudaMemoryDevice, CU_MEMORYTYPE_DEVICE);
  EXPECT_EQ(kCudaPointerAttributeMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
  EXPECT_EQ(kCudaPointerAttributeDeviceOrdinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
  EXPECT_EQ(kCudaGranularityMinimum, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
}
#endif

}  // namespace
}  // namespace weightbroker
