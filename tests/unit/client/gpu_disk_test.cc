// Loading from disk onto a GPU, with a driver in host memory: its addresses can be read here.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "client/src/disk.h"
#include "common/base/error.h"
#include "common/memory/cuda_slab.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/fake_cuda_driver.h"
#include "tests/support/fake_gpu_inventory.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker::client {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::weightbroker::testing::CheckpointBuilder;
using ::weightbroker::testing::FakeCudaDriver;
using ::weightbroker::testing::FakeGpu;
using ::weightbroker::testing::FakeGpuInventory;
using ::weightbroker::testing::FakeGpuUuid;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::TemporaryFolder;
using ::weightbroker::testing::TensorBytes;

constexpr int64_t kMiB = 1 << 20;

class GpuDiskTest : public ::testing::Test {
 protected:
  GpuDiskTest() {
    CheckpointBuilder()
        .Tensor("a", "BF16", {7, 5})
        .Tensor("b", "U8", {5 * kMiB + 3})
        .Tensor("empty", "F32", {0, 4})
        .Write(folder_.path());
    request_.spec.set_model(folder_.path());
    request_.environment.set_torch_version("any");
    request_.engine = *FindEngineDevice(cuda_, 0);
    request_.room.inventory = &inventory_;
    request_.threads = 2;
  }

  static std::vector<GpuInfo> Known() {
    GpuInfo gpu;
    gpu.uuid = FakeGpuUuid(1);
    gpu.compute_major = 9;
    return {gpu};
  }

  const TemporaryFolder folder_;
  FakeCudaDriver cuda_{{FakeGpu{.uuid = FakeGpuUuid(1), .total_bytes = 64 * kMiB}}};
  FakeGpuInventory inventory_{Known()};
  DiskRequest request_;
};

TEST_F(GpuDiskTest, PutsTheFilesBytesOntoTheEnginesGpu) {
  const auto loaded = LoadFromDisk(request_);

  ASSERT_THAT(loaded, IsOk());
  const WeightsState& weights = **loaded;
  EXPECT_EQ(weights.memory->device().uuid, FakeGpuUuid(1));
  for (const char* name : {"a", "b"}) {
    const Tensor* tensor = FindTensor(weights.manifest.tensors, name);
    ASSERT_NE(tensor, nullptr);
    const std::string bytes(reinterpret_cast<const char*>(tensor->data), static_cast<size_t>(tensor->size_bytes));
    EXPECT_EQ(bytes, TensorBytes(name, bytes.size())) << name;
  }
  EXPECT_THAT(weights.memory->Verify(weights.manifest.tensors, 1), IsOk());
}

TEST_F(GpuDiskTest, IsKnownByAFingerprintOfItsGpu) {
  const auto on_gpu = LoadFromDisk(request_);
  DiskRequest host = request_;
  host.engine = EngineDevice();
  const auto on_host = LoadFromDisk(host);

  ASSERT_THAT(on_gpu, IsOk());
  ASSERT_THAT(on_host, IsOk());
  EXPECT_NE((*on_gpu)->fingerprint, (*on_host)->fingerprint);
}

TEST_F(GpuDiskTest, GivesEverythingBackWithTheWeights) {
  const int before = cuda_.live_objects();

  LoadFromDisk(request_).value().reset();

  EXPECT_EQ(cuda_.live_objects(), before) << cuda_.DescribeLive();
  EXPECT_EQ(cuda_.used_bytes(), 0);
}

TEST_F(GpuDiskTest, LeavesNothingBehindWhateverFails) {
  for (const char* call : {"cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async",
                           "cuStreamCreate", "cuMemcpyHtoDAsync"}) {
    cuda_.Fail(call, kCudaNotPermitted);
    EXPECT_THAT(LoadFromDisk(request_), StatusIs(Reason::kCudaError, HasSubstr(call)));
    cuda_.StopFailing(call);
    EXPECT_EQ(cuda_.live_objects(), 0) << call << ": " << cuda_.DescribeLive();
    EXPECT_EQ(cuda_.used_bytes(), 0) << call;
  }
}

TEST_F(GpuDiskTest, SaysThatTheGpuHasNoRoomBeforeItReads) {
  const CudaContext context = *CudaContext::Retain(cuda_, 0);
  const auto hog = CudaVmmMemory::Create(context, 60 * kMiB);
  ASSERT_THAT(hog, IsOk());
  inventory_.SetProcesses(FakeGpuUuid(1), {{.pid = 4711, .used_bytes = 60 * kMiB}});

  const auto loaded = LoadFromDisk(request_);

  EXPECT_THAT(loaded, AllOf(StatusIs(Reason::kMemoryExhausted, HasSubstr("4711")),
                            HasMetadata("have_bytes", std::to_string(4 * kMiB)),
                            HasMetadata("need_bytes", std::to_string(6 * kMiB))));
}

TEST_F(GpuDiskTest, NeedsNvmlForItsFingerprint) {
  request_.room.inventory = nullptr;

  EXPECT_THAT(LoadFromDisk(request_), StatusIs(Reason::kGpuUnavailable, HasSubstr("NVML")));
}

}  // namespace
}  // namespace weightbroker::client
