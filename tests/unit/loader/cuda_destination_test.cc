// GPU memory is filled with the same bytes as host memory, and given the same digests, whatever is done to them on the
// way.

#include "common/load/cuda_destination.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <set>
#include <thread>

#include "common/base/status_macros.h"
#include "common/device/gpu_digest.h"
#include "common/load/host_destination.h"
#include "common/memory/cuda_slab.h"
#include "tests/support/fake_cuda_driver.h"
#include "tests/support/status_matchers.h"
#include "tests/support/transform_case.h"

namespace weightbroker {
namespace {

using testing::FakeCudaDriver;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;
using testing::TransformCase;

class CudaDestinationTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasGpuKernels()) GTEST_SKIP() << "this build has no GPU kernels";
  }

  void TearDown() override { EXPECT_EQ(cuda_.live_objects(), 0) << cuda_.DescribeLive(); }

  // Fills VMM memory through `fill` and gives its bytes and digests.
  struct Filled {
    std::vector<std::byte> bytes;
    std::vector<Digest> digests;
  };
  absl::StatusOr<Filled> FillGpu(const std::function<absl::Status(Destination&)>& fill) {
    const CudaContext context = *CudaContext::Retain(cuda_, 0);
    const auto memory = CudaVmmMemory::Create(context, case_.plan.slab_bytes[0]);
    auto range = CudaReservation::Reserve(context, memory->size_bytes());
    RETURN_IF_ERROR(range->Map(0, *memory, CudaAccess::kReadWrite));
    ASSIGN_OR_RETURN(const auto destination,
                     MakeCudaDestination(
                         case_.plan, {{range->address(), memory->size_bytes()}}, context,
                         [&] { return range->SetAccess(CudaAccess::kRead); }, digest_batch_bytes_));
    const int before = cuda_.CallCount("cuLaunchKernel");
    RETURN_IF_ERROR(fill(*destination));
    launches_while_filling_ = cuda_.CallCount("cuLaunchKernel") - before;
    Filled filled;
    ASSIGN_OR_RETURN(filled.digests, destination->Finish());
    const auto* const data = reinterpret_cast<const std::byte*>(range->address());
    filled.bytes.assign(data, data + case_.plan.slab_bytes[0]);
    return filled;
  }

  Filled FillHost() {
    std::vector<HostSlab> slabs;
    slabs.push_back(*HostSlab::Create(case_.plan.slab_bytes[0]));
    const auto destination = MakeHostDestination(case_.plan, slabs, FillMethod::kCopy);
    EXPECT_THAT(destination->Store(case_.chunk, case_.transfers), IsOk());
    Filled filled;
    filled.digests = destination->Finish().value();
    const auto bytes = slabs[0].writable_bytes();
    filled.bytes.assign(bytes.begin(), bytes.end());
    return filled;
  }

  FakeCudaDriver cuda_;
  TransformCase case_ = TransformCase::Make();
  int64_t digest_batch_bytes_ = LandedDigests::kBatchBytes;
  int launches_while_filling_ = 0;
};

TEST_F(CudaDestinationTest, HasTheBytesAndDigestsOfHostMemoryForEveryTransform) {
  const auto gpu = FillGpu([&](Destination& destination) -> absl::Status {
    RETURN_IF_ERROR(destination.Store(case_.chunk, case_.transfers));
    return destination.Release(case_.chunk);
  });
  ASSERT_THAT(gpu, IsOk());
  const Filled host = FillHost();
  EXPECT_EQ(std::memcmp(gpu->bytes.data(), host.bytes.data(), host.bytes.size()), 0);
  for (size_t i = 0; i < case_.plan.tensors.size(); ++i) {
    const TensorPlacement& tensor = case_.plan.tensors[i];
    EXPECT_EQ(DigestHex(gpu->digests[i]),
              DigestHex(ComputeDigest(
                  std::span(gpu->bytes)
                      .subspan(static_cast<size_t>(tensor.slab_offset_bytes), static_cast<size_t>(tensor.size_bytes)))))
        << tensor.name;
  }
}

TEST_F(CudaDestinationTest, DigestsWhatHasLandedWhileTheRestIsStillToCome) {
  const auto fill = [&](Destination& destination) -> absl::Status {
    for (size_t i = 0; i < case_.transfers.size(); ++i) {
      RETURN_IF_ERROR(destination.Store(case_.chunk, std::span(case_.transfers).subspan(i, 1)));
      RETURN_IF_ERROR(destination.Release(case_.chunk));
    }
    return absl::OkStatus();
  };
  const auto at_the_end = FillGpu(fill);
  ASSERT_THAT(at_the_end, IsOk());
  const int launches_to_fill = launches_while_filling_;
  digest_batch_bytes_ = 1;
  const auto meanwhile = FillGpu(fill);
  ASSERT_THAT(meanwhile, IsOk());
  EXPECT_EQ(meanwhile->digests, at_the_end->digests);
  int with_bytes = 0;
  for (const Transfer& transfer : case_.transfers) {
    with_bytes += case_.plan.tensors[static_cast<size_t>(transfer.tensor)].size_bytes > 0 ? 1 : 0;
  }
  EXPECT_EQ(launches_while_filling_, launches_to_fill + with_bytes) << "one for each tensor that became whole";
}

TEST_F(CudaDestinationTest, DigestsNothingThatIsNotKnownToHaveLanded) {
  digest_batch_bytes_ = 1;
  cuda_.Fail("cuEventSynchronize", kCudaIllegalAddress);
  int before = 0;
  EXPECT_THAT(FillGpu([&](Destination& destination) -> absl::Status {
                RETURN_IF_ERROR(destination.Store(case_.chunk, case_.transfers));
                before = cuda_.CallCount("cuLaunchKernel");
                return destination.Release(case_.chunk);
              }),
              StatusIs(Reason::kCudaError, HasSubstr("cuEventSynchronize")));
  EXPECT_EQ(cuda_.CallCount("cuLaunchKernel"), before);
}

TEST_F(CudaDestinationTest, IsReadForByAsManyThreadsAsSuitTheNumberOfGpus) {
  CudaBuffers buffers;
  EXPECT_EQ(TuneForCuda({}, buffers, 1).reader_threads, kCudaReaderThreads);
  EXPECT_EQ(TuneForCuda({}, buffers, 2).reader_threads, kCudaReaderThreadsForTwo);
  EXPECT_EQ(TuneForCuda({}, buffers, 3).reader_threads, 3 * kCudaReaderThreads);
  EXPECT_EQ(TuneForCuda({}, buffers, 8).reader_threads, kMostCudaReaderThreads);
  EXPECT_EQ(TuneForCuda({.reader_threads = 3}, buffers, 2).reader_threads, 3);
}

TEST_F(CudaDestinationTest, LetsAChunkBeUsedAgainOnlyOnceItHasLanded) {
  const auto gpu = FillGpu([&](Destination& destination) -> absl::Status {
    std::vector<std::byte> buffer = case_.chunk;
    RETURN_IF_ERROR(destination.Store(buffer, case_.transfers));
    RETURN_IF_ERROR(destination.Release(buffer));
    std::fill(buffer.begin(), buffer.end(), std::byte{0xEE});
    return absl::OkStatus();
  });
  ASSERT_THAT(gpu, IsOk());
  const Filled host = FillHost();
  EXPECT_EQ(std::memcmp(gpu->bytes.data(), host.bytes.data(), host.bytes.size()), 0);
}

TEST_F(CudaDestinationTest, ReleasesByAnyBufferThatHoldsTheChunk) {
  const auto gpu = FillGpu([&](Destination& destination) -> absl::Status {
    std::vector<std::byte> buffer(case_.chunk.size() + 4096);
    std::copy(case_.chunk.begin(), case_.chunk.end(), buffer.begin() + 512);
    const auto chunk = std::span(buffer).subspan(512, case_.chunk.size());
    RETURN_IF_ERROR(destination.Store(chunk, case_.transfers));
    RETURN_IF_ERROR(destination.Release(buffer));
    std::fill(buffer.begin(), buffer.end(), std::byte{0xEE});
    return absl::OkStatus();
  });
  ASSERT_THAT(gpu, IsOk());
  EXPECT_EQ(std::memcmp(gpu->bytes.data(), FillHost().bytes.data(), gpu->bytes.size()), 0);
}

TEST_F(CudaDestinationTest, TakesTransfersFromSeveralThreads) {
  const auto gpu = FillGpu([&](Destination& destination) {
    const std::vector<Transfer>& all = case_.transfers;
    std::vector<std::vector<std::byte>> chunks(all.size(), case_.chunk);
    std::vector<absl::Status> results(all.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < all.size(); ++i) {
      threads.emplace_back([&, i] {
        results[i] = destination.Store(chunks[i], std::span(all).subspan(i, 1));
        results[i].Update(destination.Release(chunks[i]));
      });
    }
    for (std::thread& thread : threads) thread.join();
    absl::Status first;
    for (const absl::Status& result : results) first.Update(result);
    return first;
  });
  ASSERT_THAT(gpu, IsOk());
  EXPECT_EQ(std::memcmp(gpu->bytes.data(), FillHost().bytes.data(), gpu->bytes.size()), 0);
}

TEST_F(CudaDestinationTest, NamesAWeightThatIsNotFinite) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(case_.chunk.data() + (17 * TransformCase::kColumns + 5) * 4, &nan, sizeof(nan));
  const auto gpu = FillGpu([&](Destination& destination) {
    absl::Status status = destination.Store(case_.chunk, std::span(case_.transfers).subspan(case_.quantized, 1));
    status.Update(destination.Release(case_.chunk));
    return status;
  });
  EXPECT_THAT(gpu, StatusIs(Reason::kWeightNotFinite, HasSubstr("row 17, column 5")));
}

TEST_F(CudaDestinationTest, AnErrorOfEveryCallIsReportedByItsNameAndNothingIsLeft) {
  for (const char* call : {"cuStreamCreate", "cuStreamWaitEvent", "cuEventCreate", "cuEventRecord",
                           "cuEventSynchronize", "cuMemcpyHtoDAsync", "cuMemcpy2DAsync", "cuMemHostAlloc",
                           "cuLaunchKernel", "cuCtxSynchronize", "cuMemSetAccess"}) {
    const int after = std::string(call) == "cuMemSetAccess" ? 1 : 0;  // the first opens the mapping for writing
    cuda_.Fail(call, kCudaIllegalAddress, after);
    const auto gpu = FillGpu([&](Destination& destination) {
      absl::Status status = destination.Store(case_.chunk, case_.transfers);
      status.Update(destination.Release(case_.chunk));
      return status;
    });
    EXPECT_THAT(gpu, StatusIs(Reason::kCudaError, HasSubstr(call)));
    cuda_.StopFailing(call);
    EXPECT_EQ(cuda_.live_objects(), 0) << "after " << call << ": " << cuda_.DescribeLive();
  }
}

TEST_F(CudaDestinationTest, ReadBuffersArePinnedAtOnceAndGivenBack) {
  constexpr int64_t kMiB = 1 << 20;
  CudaBuffers buffers;
  ASSERT_THAT(buffers.Reserve(3, kMiB), IsOk());
  EXPECT_EQ(buffers.pinned_bytes(), 0) << "without a context nothing can be";
  buffers.Pin(*CudaContext::Retain(cuda_, 0));
  EXPECT_EQ(cuda_.registered_runs(), 1);
  EXPECT_EQ(buffers.pinned_bytes(), 4 * kMiB) << "whole huge pages";
  std::set<std::byte*> starts;
  for (int i = 0; i < 4; ++i) {
    const auto buffer = buffers.Allocate(kMiB);
    ASSERT_THAT(buffer, IsOk());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % kMiB, 0u);
    starts.insert(buffer->data());
  }
  EXPECT_EQ(starts.size(), 4u);
  EXPECT_EQ(buffers.pinned_bytes(), 4 * kMiB) << "what was reserved was enough: two share a huge page";
  ASSERT_THAT(buffers.Allocate(kMiB), IsOk());
  EXPECT_EQ(buffers.pinned_bytes(), 6 * kMiB) << "and more than that is pinned when it is asked for";
  EXPECT_EQ(buffers.unpinned_bytes(), 0);
}

TEST_F(CudaDestinationTest, AsManyReadBuffersArePinnedAsCanBe) {
  CudaBuffers buffers;
  ASSERT_THAT(buffers.Reserve(4, 2 << 20), IsOk());
  cuda_.LimitRegisteredBytes(5 << 20);
  buffers.Pin(*CudaContext::Retain(cuda_, 0));
  EXPECT_EQ(buffers.pinned_bytes(), 4 << 20);
  EXPECT_EQ(buffers.unpinned_bytes(), 4 << 20);
}

TEST_F(CudaDestinationTest, ReadBuffersThatCannotBePinnedAreOrdinaryMemoryAndThatIsSaidOnce) {
  CudaBuffers buffers;
  buffers.Pin(*CudaContext::Retain(cuda_, 0));
  cuda_.Fail("cuMemHostRegister", kCudaOutOfMemory);
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 2; ++i) {
    const auto buffer = buffers.Allocate(2 << 20);
    ASSERT_THAT(buffer, IsOk());
    std::fill(buffer->begin(), buffer->end(), std::byte{1});
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(buffers.pinned_bytes(), 0);
  EXPECT_EQ(buffers.unpinned_bytes(), 4 << 20);
  const size_t first = log.find("load.not_pinned");
  ASSERT_NE(first, std::string::npos);
  EXPECT_EQ(log.find("load.not_pinned", first + 1), std::string::npos);
}

// Tensors of every length and alignment, many in one chunk.
class ShortRunsTest : public CudaDestinationTest {
 protected:
  void SetUp() override {
    CudaDestinationTest::SetUp();
    case_ = {};
    int64_t from = 0;
    int64_t to = 0;
    for (int64_t i = 0; i < 200; ++i) {
      const int64_t size_bytes = i < 100 ? i : i * i + 1;
      TensorPlacement tensor;
      tensor.name = "t" + std::to_string(1000 + i);
      tensor.dtype = FindDtype("U8");
      tensor.shape = {size_bytes};
      tensor.size_bytes = size_bytes;
      tensor.slab_offset_bytes = to;
      case_.plan.tensors.push_back(tensor);
      case_.transfers.push_back({.tensor = static_cast<int32_t>(i),
                                 .transform = Transform::kCopy,
                                 .source_dtype = tensor.dtype,
                                 .run_elements = size_bytes,
                                 .source_offset_bytes = from});
      from += size_bytes;
      to += (size_bytes + 255) / 256 * 256;
    }
    case_.plan.slab_bytes = {to};
    case_.chunk.resize(static_cast<size_t>(from));
    for (size_t i = 0; i < case_.chunk.size(); ++i) case_.chunk[i] = static_cast<std::byte>(i * 7 + i / 256);
  }

  // Through a buffer that is pinned.
  absl::Status StoreFromPinned(Destination& destination) {
    CudaBuffers buffers;
    buffers.Pin(*CudaContext::Retain(cuda_, 0));
    const auto buffer = *buffers.Allocate(static_cast<int64_t>(case_.chunk.size()));
    std::copy(case_.chunk.begin(), case_.chunk.end(), buffer.begin());
    absl::Status status = destination.Store(buffer, case_.transfers);
    status.Update(destination.Release(buffer));
    return status;
  }

  void ExpectEveryByte(const Filled& filled) {
    for (size_t i = 0; i < case_.transfers.size(); ++i) {
      const TensorPlacement& tensor = case_.plan.tensors[i];
      ASSERT_EQ(std::memcmp(filled.bytes.data() + tensor.slab_offset_bytes,
                            case_.chunk.data() + case_.transfers[i].source_offset_bytes,
                            static_cast<size_t>(tensor.size_bytes)),
                0)
          << tensor.name;
    }
  }
};

TEST_F(ShortRunsTest, AreCopiedTogetherFromPinnedMemory) {
  cuda_.Fail("cuMemcpyHtoDAsync", kCudaNotSupported);  // not one of them by a call of its own
  const auto gpu = FillGpu([&](Destination& destination) {
    const absl::Status status = StoreFromPinned(destination);
    cuda_.StopFailing("cuMemcpyHtoDAsync");  // digests need it
    return status;
  });
  ASSERT_THAT(gpu, IsOk());
  ExpectEveryByte(*gpu);
}

TEST_F(ShortRunsTest, AreCopiedOneByOneWhereTheirListCannotBePinned) {
  cuda_.Fail("cuMemHostAlloc", kCudaOutOfMemory);
  const auto gpu = FillGpu([&](Destination& destination) { return StoreFromPinned(destination); });
  ASSERT_THAT(gpu, IsOk());
  ExpectEveryByte(*gpu);
}

TEST_F(ShortRunsTest, AreCopiedOneByOneFromMemoryThatTheGpuCannotRead) {
  const auto gpu = FillGpu([&](Destination& destination) -> absl::Status {
    RETURN_IF_ERROR(destination.Store(case_.chunk, case_.transfers));
    return destination.Release(case_.chunk);
  });
  ASSERT_THAT(gpu, IsOk());
  ExpectEveryByte(*gpu);
}

}  // namespace
}  // namespace weightbroker
