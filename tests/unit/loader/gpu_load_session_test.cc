// A whole load into GPU memory, by a loader's session with a driver in host memory.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/base/error.h"
#include "common/base/socket.h"
#include "common/device/gpu_digest.h"
#include "common/memory/cuda_slab.h"
#include "common/plan/manifest.h"
#include "server/loader/load_session.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/fake_cuda_driver.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker {
namespace {

namespace pb = ::weightbroker::internal::v1;
using ::testing::AllOf;
using testing::CheckpointBuilder;
using testing::FakeCudaDriver;
using testing::FakeGpuUuid;
using testing::HasMetadata;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;
using testing::TemporaryFolder;
using testing::TensorBytes;

class GpuLoadSessionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasGpuKernels()) GTEST_SKIP() << "this build has no GPU kernels";
    CheckpointBuilder()
        .Tensor("odd", "U8", {3}, "x.safetensors")
        .Tensor("a.weight", "BF16", {100, 300}, "x.safetensors")
        .Tensor("b.weight", "F32", {1000}, "y.safetensors")
        .WithIndex()
        .Write(folder_.path());
  }

  ~GpuLoadSessionTest() override {
    End();
    EXPECT_EQ(cuda_.live_objects(), 0) << cuda_.DescribeLive();
  }

  pb::LoadRequest Request(v1::HandleKind kind, const std::string& device = FakeGpuUuid(2)) {
    pb::LoadRequest request;
    *request.mutable_spec() = *CompleteSpec({});
    ToProto(*ReadCheckpointIdentity(RealFileSystem(), folder_.path()), &request);
    pb::RankPlacement& rank = *request.add_ranks();
    rank.set_device(device);
    request.set_handle_kind(kind);
    return request;
  }

  // Plays the broker until the shard is there or the load has failed; gives what the loader told of the failure.
  absl::Status RunLoad(const pb::LoadRequest& request) {
    SocketPair pair = *CreateSeqpacketPair();
    control_ = std::move(pair.first);
    loader_ = std::thread([this, request, socket = std::make_shared<UniqueFd>(std::move(pair.second))] {
      status_ = RunLoadSession(
          RealFileSystem(), request, socket->get(), {.reader_threads = 3}, [] {}, [this] { return open_(); });
      socket->reset();
    });
    while (true) {
      auto message = ReceiveMessage(control_.get());
      if (!message.ok() || message->closed) return absl::UnknownError("the loader ended without a word");
      pb::LoadEvent event;
      EXPECT_TRUE(event.ParseFromString(message->bytes));
      if (event.has_planned()) {
        pb::LoadCommand command;
        command.set_proceed(true);
        EXPECT_THAT(SendMessage(control_.get(), command.SerializeAsString()), IsOk());
      }
      if (event.has_failed()) return ParseRpcStatus(event.failed().SerializeAsString());
      if (event.has_sealed()) {
        sealed_ = event.sealed();
        fds_ = std::move(message->fds);
        return absl::OkStatus();
      }
    }
  }

  // As a broker and a keeper that let the set go.
  void End() {
    control_.reset();
    if (loader_.joinable()) loader_.join();
  }

  void ExpectTensorsAt(const std::byte* slab) {
    std::string manifest(static_cast<size_t>(sealed_.manifest_bytes()), '\0');
    ASSERT_EQ(pread(fds_.back().get(), manifest.data(), manifest.size(), 0), static_cast<ssize_t>(manifest.size()));
    int tensors = 0;
    const std::vector<std::string_view> frames = SplitManifest(manifest).value();
    for (const std::string_view frame : frames) {
      v1::ExportResponse message;
      ASSERT_TRUE(message.ParseFromArray(frame.data(), static_cast<int>(frame.size())));
      for (const v1::Tensor& tensor : message.manifest().tensors()) {
        const std::string wanted = TensorBytes(tensor.name(), static_cast<size_t>(tensor.size_bytes()));
        EXPECT_EQ(std::memcmp(slab + tensor.offset_bytes(), wanted.data(), wanted.size()), 0) << tensor.name();
        const Digest digest = ComputeDigest(std::as_bytes(std::span(wanted)));
        EXPECT_EQ(tensor.digest(), std::string(reinterpret_cast<const char*>(digest.data()), digest.size()));
        ++tensors;
      }
    }
    EXPECT_EQ(tensors, 3);
  }

  // Runs a load that must fail, and checks that everything has been given back.
  absl::Status FailureOf(const pb::LoadRequest& request) {
    const absl::Status told = RunLoad(request);
    End();
    EXPECT_EQ(status_.code(), told.code());
    EXPECT_EQ(cuda_.live_objects(), 0) << cuda_.DescribeLive();
    EXPECT_EQ(cuda_.used_bytes(), 0);
    return told;
  }

  const TemporaryFolder folder_;
  FakeCudaDriver cuda_{{{.uuid = FakeGpuUuid(1)}, {.uuid = FakeGpuUuid(2), .total_bytes = 64 << 20}}};
  CudaOpener open_ = [this] { return absl::StatusOr<CudaDriver*>(&cuda_); };
  UniqueFd control_;
  std::thread loader_;
  absl::Status status_;
  pb::LoadSealed sealed_;
  std::vector<UniqueFd> fds_;
};

TEST_F(GpuLoadSessionTest, HandsOverDescriptorsOfVmmMemoryAndLeavesNothingOfCudaBehind) {
  ASSERT_THAT(RunLoad(Request(v1::HANDLE_KIND_CUDA_VMM_FD)), IsOk());
  End();
  EXPECT_THAT(status_, IsOk());
  EXPECT_EQ(cuda_.live_objects(), 0) << cuda_.DescribeLive();
  ASSERT_EQ(sealed_.slabs_size(), 1);
  const v1::Slab& slab = sealed_.slabs(0);
  EXPECT_EQ(slab.handle_kind(), v1::HANDLE_KIND_CUDA_VMM_FD);
  EXPECT_EQ(slab.device_uuid(), FakeGpuUuid(2));
  EXPECT_EQ(slab.size_bytes() % FakeCudaDriver::kGranularityBytes, 0);
  ASSERT_EQ(fds_.size(), 2u);

  const CudaContext engine = *CudaContext::Retain(cuda_, 1);
  const auto memory = CudaVmmMemory::Import(engine, fds_[0].get(), slab.size_bytes());
  ASSERT_THAT(memory, IsOk());
  auto range = CudaReservation::Reserve(engine, slab.size_bytes());
  ASSERT_THAT(range->Map(0, *memory, CudaAccess::kRead), IsOk());
  ExpectTensorsAt(reinterpret_cast<const std::byte*>(range->address()));
}

TEST_F(GpuLoadSessionTest, StaysAsTheExporterOfIpcMemoryUntilItsControlSocketCloses) {
  ASSERT_THAT(RunLoad(Request(v1::HANDLE_KIND_CUDA_IPC)), IsOk());
  ASSERT_EQ(sealed_.slabs_size(), 1);
  ASSERT_EQ(fds_.size(), 1u);
  const v1::Slab& slab = sealed_.slabs(0);
  ASSERT_EQ(slab.cuda_ipc_handle().size(), sizeof(CudaIpcHandle));
  CudaIpcHandle handle;
  std::memcpy(handle.data(), slab.cuda_ipc_handle().data(), handle.size());
  {
    const CudaContext engine = *CudaContext::Retain(cuda_, 1);
    const auto mapping = CudaIpcMapping::Open(engine, handle, slab.size_bytes());
    ASSERT_THAT(mapping, IsOk());
    ExpectTensorsAt(reinterpret_cast<const std::byte*>(mapping->address()));
  }
  EXPECT_GT(cuda_.used_bytes(), 0);
  End();
  EXPECT_THAT(status_, IsOk());
  EXPECT_EQ(cuda_.used_bytes(), 0);
}

TEST_F(GpuLoadSessionTest, SaysThatThereIsNoDriver) {
  open_ = [] { return absl::StatusOr<CudaDriver*>(MakeError(Reason::kGpuUnavailable, "no libcuda.so.1")); };
  EXPECT_THAT(FailureOf(Request(v1::HANDLE_KIND_CUDA_VMM_FD)),
              StatusIs(Reason::kGpuUnavailable, HasSubstr("no libcuda.so.1")));
}

TEST_F(GpuLoadSessionTest, NamesAnUnknownUuid) {
  EXPECT_THAT(FailureOf(Request(v1::HANDLE_KIND_CUDA_VMM_FD, FakeGpuUuid(9))),
              StatusIs(Reason::kDeviceUnknown, HasSubstr(FakeGpuUuid(9))));
}

TEST_F(GpuLoadSessionTest, SaysNeedAndHaveWhereTheDeviceIsFull) {
  for (const auto kind : {v1::HANDLE_KIND_CUDA_VMM_FD, v1::HANDLE_KIND_CUDA_IPC}) {
    cuda_.Fail(kind == v1::HANDLE_KIND_CUDA_VMM_FD ? "cuMemCreate" : "cuMemAlloc", kCudaOutOfMemory);
    EXPECT_THAT(
        FailureOf(Request(kind)),
        AllOf(StatusIs(Reason::kMemoryExhausted, HasSubstr(FakeGpuUuid(2))), HasMetadata("need_bytes", "2097152"),
              HasMetadata("have_bytes", "67108864"), HasMetadata("device_uuid", FakeGpuUuid(2))));
    cuda_.StopFailing("cuMemCreate");
    cuda_.StopFailing("cuMemAlloc");
  }
}

TEST_F(GpuLoadSessionTest, NamesCuMemCreateThatIsRefused) {
  cuda_.Fail("cuMemCreate", kCudaNotPermitted);
  EXPECT_THAT(FailureOf(Request(v1::HANDLE_KIND_CUDA_VMM_FD)),
              StatusIs(Reason::kCudaError, HasSubstr("cuMemCreate failed with CUDA_ERROR_NOT_PERMITTED")));
}

TEST_F(GpuLoadSessionTest, AStickyErrorEndsThisLoadAndTheNextOneGoesWell) {
  cuda_.Fail("cuEventSynchronize", kCudaIllegalAddress);
  EXPECT_THAT(FailureOf(Request(v1::HANDLE_KIND_CUDA_VMM_FD)),
              AllOf(StatusIs(Reason::kCudaError), HasMetadata("result", "CUDA_ERROR_ILLEGAL_ADDRESS")));
  cuda_.StopFailing("cuEventSynchronize");
  EXPECT_THAT(RunLoad(Request(v1::HANDLE_KIND_CUDA_VMM_FD)), IsOk());
}

TEST_F(GpuLoadSessionTest, GivesEverythingBackWhicheverCallFails) {
  for (const char* call :
       {"cuDevicePrimaryCtxRetain", "cuDeviceGetAttribute", "cuMemGetAllocationGranularity", "cuMemAddressReserve",
        "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async", "cuCtxSynchronize", "cuModuleLoadData", "cuStreamCreate",
        "cuStreamWaitEvent", "cuEventCreate", "cuMemcpyHtoDAsync", "cuEventRecord", "cuEventSynchronize",
        "cuLaunchKernel", "cuMemcpyDtoHAsync", "cuMemExportToShareableHandle"}) {
    cuda_.Fail(call, kCudaNotSupported);
    EXPECT_FALSE(FailureOf(Request(v1::HANDLE_KIND_CUDA_VMM_FD)).ok()) << call;
    cuda_.StopFailing(call);
  }
}

}  // namespace
}  // namespace weightbroker
