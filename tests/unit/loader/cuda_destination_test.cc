// GPU memory is filled with the same bytes as host memory, and given the same digests, whatever is done to them on the
// way.

#include "common/load/cuda_destination.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>

#include "common/base/status_macros.h"
#include "common/checkpoint/dtype.h"
#include "common/device/gpu_digest.h"
#include "common/load/host_destination.h"
#include "common/memory/cuda_slab.h"
#include "tests/support/fake_cuda_driver.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using testing::FakeCudaDriver;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;

const DtypeInfo* Dtype(const char* name) { return FindDtype(name); }

TensorPlacement Tensor(const std::string& name, const char* dtype, std::vector<int64_t> shape, int64_t offset_bytes) {
  TensorPlacement tensor;
  tensor.name = name;
  tensor.dtype = Dtype(dtype);
  tensor.size_bytes = tensor.dtype->bits / 8;
  for (const int64_t n : shape) tensor.size_bytes *= n;
  tensor.shape = std::move(shape);
  tensor.slab_offset_bytes = offset_bytes;
  return tensor;
}

// A plan with one tensor for each way of filling, and the transfers that fill them from one chunk.
class CudaDestinationTest : public ::testing::Test {
 protected:
  static constexpr int64_t kRows = 200;
  static constexpr int64_t kColumns = 300;

  void SetUp() override {
    if (!HasGpuKernels()) GTEST_SKIP() << "this build has no GPU kernels";
    plan_.tensors = {Tensor("a.columns", "BF16", {kRows, kColumns / 2}, 0),
                     Tensor("b.converted", "BF16", {kRows, kColumns}, 1 << 20),
                     Tensor("c.transposed", "F32", {kColumns, kRows}, 2 << 20),
                     Tensor("d.quantized", "F8_E4M3", {kRows, kColumns}, 3 << 20),
                     Tensor("d.scales", "F32", {2, 3}, 4 << 20),
                     Tensor("e.whole", "U8", {5, 1001}, 5 << 20),
                     Tensor("f.alias", "U8", {5, 1001}, 5 << 20),
                     Tensor("g.empty", "F32", {0}, 6 << 20)};
    plan_.tensors[6].alias_of = "e.whole";
    plan_.tensors[3].transform = Transform::kQuantizeFp8Block;
    plan_.tensors[3].scale_tensor = 4;
    plan_.tensors[4].is_scale = true;
    plan_.tensors[2].transform = Transform::kTranspose;
    plan_.tensors[1].transform = Transform::kConvert;
    plan_.slab_bytes = {8 << 20};
    for (const Transfer& transfer : Transfers()) {
      const int64_t source_bytes = transfer.source_dtype->bits / 8;
      plan_.tensors[static_cast<size_t>(transfer.tensor)].pieces = {
          {.run_elements = transfer.run_elements,
           .run_count = transfer.run_count,
           .source_offset = transfer.source_offset_bytes / source_bytes,
           .source_stride = transfer.source_stride_bytes / source_bytes,
           .offset = transfer.offset,
           .stride = transfer.stride,
           .element_stride = transfer.element_stride,
           .scale_offset = transfer.scale_offset,
           .scale_stride = transfer.scale_stride}};
    }
    std::mt19937 random(7);
    std::normal_distribution<float> value(0, 1);
    chunk_.resize(kRows * kColumns * sizeof(float));
    for (int64_t i = 0; i < kRows * kColumns; ++i) {
      const float x = value(random);
      std::memcpy(chunk_.data() + i * static_cast<int64_t>(sizeof(x)), &x, sizeof(x));
    }
  }

  void TearDown() override { EXPECT_EQ(cuda_.live_objects(), 0) << cuda_.DescribeLive(); }

  static std::vector<Transfer> Transfers() {
    constexpr int64_t kRowBytes = kColumns * 4;
    return {{.tensor = 0,
             .transform = Transform::kCopy,
             .source_dtype = Dtype("BF16"),
             .run_elements = kColumns / 2,
             .run_count = kRows,
             .source_offset_bytes = 4,
             .source_stride_bytes = kRowBytes,
             .stride = kColumns / 2},
            {.tensor = 1,
             .transform = Transform::kConvert,
             .source_dtype = Dtype("F32"),
             .run_elements = kColumns,
             .run_count = kRows,
             .source_stride_bytes = kRowBytes,
             .stride = kColumns},
            {.tensor = 2,
             .transform = Transform::kTranspose,
             .source_dtype = Dtype("F32"),
             .run_elements = kColumns,
             .run_count = kRows,
             .source_stride_bytes = kRowBytes,
             .stride = 1,
             .element_stride = kRows},
            {.tensor = 3,
             .transform = Transform::kQuantizeFp8Block,
             .source_dtype = Dtype("F32"),
             .run_elements = kColumns,
             .run_count = kRows,
             .source_stride_bytes = kRowBytes,
             .stride = kColumns,
             .scale_stride = 3},
            {.tensor = 5,
             .transform = Transform::kCopy,
             .source_dtype = Dtype("U8"),
             .run_elements = 5 * 1001,
             .source_offset_bytes = 13}};
  }

  // Fills VMM memory through `fill` and gives its bytes and digests.
  struct Filled {
    std::vector<std::byte> bytes;
    std::vector<Digest> digests;
  };
  absl::StatusOr<Filled> FillGpu(const std::function<absl::Status(Destination&)>& fill) {
    const CudaContext context = *CudaContext::Retain(cuda_, 0);
    const auto memory = CudaVmmMemory::Create(context, plan_.slab_bytes[0]);
    auto range = CudaReservation::Reserve(context, memory->size_bytes());
    RETURN_IF_ERROR(range->Map(0, *memory, CudaAccess::kReadWrite));
    ASSIGN_OR_RETURN(const auto destination, MakeCudaDestination(plan_, {range->address()}, context,
                                                                 [&] { return range->SetAccess(CudaAccess::kRead); }));
    RETURN_IF_ERROR(fill(*destination));
    Filled filled;
    ASSIGN_OR_RETURN(filled.digests, destination->Finish());
    const auto* const data = reinterpret_cast<const std::byte*>(range->address());
    filled.bytes.assign(data, data + plan_.slab_bytes[0]);
    return filled;
  }

  Filled FillHost() {
    std::vector<HostSlab> slabs;
    slabs.push_back(*HostSlab::Create(plan_.slab_bytes[0]));
    const auto destination = MakeHostDestination(plan_, slabs, FillMethod::kCopy);
    EXPECT_THAT(destination->Store(chunk_, Transfers()), IsOk());
    Filled filled;
    filled.digests = destination->Finish().value();
    const auto bytes = slabs[0].writable_bytes();
    filled.bytes.assign(bytes.begin(), bytes.end());
    return filled;
  }

  FakeCudaDriver cuda_;
  ShardPlan plan_;
  std::vector<std::byte> chunk_;
};

TEST_F(CudaDestinationTest, HasTheBytesAndDigestsOfHostMemoryForEveryTransform) {
  const auto gpu = FillGpu([&](Destination& destination) -> absl::Status {
    RETURN_IF_ERROR(destination.Store(chunk_, Transfers()));
    return destination.Release(chunk_);
  });
  ASSERT_THAT(gpu, IsOk());
  const Filled host = FillHost();
  EXPECT_EQ(std::memcmp(gpu->bytes.data(), host.bytes.data(), host.bytes.size()), 0);
  for (size_t i = 0; i < plan_.tensors.size(); ++i) {
    const TensorPlacement& tensor = plan_.tensors[i];
    EXPECT_EQ(DigestHex(gpu->digests[i]),
              DigestHex(ComputeDigest(
                  std::span(gpu->bytes)
                      .subspan(static_cast<size_t>(tensor.slab_offset_bytes), static_cast<size_t>(tensor.size_bytes)))))
        << tensor.name;
  }
}

TEST_F(CudaDestinationTest, LetsAChunkBeUsedAgainOnlyOnceItHasLanded) {
  const auto gpu = FillGpu([&](Destination& destination) -> absl::Status {
    std::vector<std::byte> buffer = chunk_;
    RETURN_IF_ERROR(destination.Store(buffer, Transfers()));
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
    std::vector<std::byte> buffer(chunk_.size() + 4096);
    std::copy(chunk_.begin(), chunk_.end(), buffer.begin() + 512);
    const auto chunk = std::span(buffer).subspan(512, chunk_.size());
    RETURN_IF_ERROR(destination.Store(chunk, Transfers()));
    RETURN_IF_ERROR(destination.Release(buffer));
    std::fill(buffer.begin(), buffer.end(), std::byte{0xEE});
    return absl::OkStatus();
  });
  ASSERT_THAT(gpu, IsOk());
  EXPECT_EQ(std::memcmp(gpu->bytes.data(), FillHost().bytes.data(), gpu->bytes.size()), 0);
}

TEST_F(CudaDestinationTest, TakesTransfersFromSeveralThreads) {
  const auto gpu = FillGpu([&](Destination& destination) {
    const std::vector<Transfer> all = Transfers();
    std::vector<std::vector<std::byte>> chunks(all.size(), chunk_);
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
  std::memcpy(chunk_.data() + (17 * kColumns + 5) * 4, &nan, sizeof(nan));
  const auto gpu = FillGpu([&](Destination& destination) {
    absl::Status status = destination.Store(chunk_, std::vector<Transfer>{Transfers()[3]});
    status.Update(destination.Release(chunk_));
    return status;
  });
  EXPECT_THAT(gpu, StatusIs(Reason::kWeightNotFinite, HasSubstr("row 17, column 5")));
}

TEST_F(CudaDestinationTest, AnErrorOfEveryCallIsReportedByItsNameAndNothingIsLeft) {
  for (const char* call :
       {"cuStreamCreate", "cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuMemcpyHtoDAsync",
        "cuMemcpy2DAsync", "cuMemHostAlloc", "cuLaunchKernel", "cuCtxSynchronize", "cuMemSetAccess"}) {
    const int after = std::string(call) == "cuMemSetAccess" ? 1 : 0;  // the first opens the mapping for writing
    cuda_.Fail(call, kCudaIllegalAddress, after);
    const auto gpu = FillGpu([&](Destination& destination) {
      absl::Status status = destination.Store(chunk_, Transfers());
      status.Update(destination.Release(chunk_));
      return status;
    });
    EXPECT_THAT(gpu, StatusIs(Reason::kCudaError, HasSubstr(call)));
    cuda_.StopFailing(call);
    EXPECT_EQ(cuda_.live_objects(), 0) << "after " << call << ": " << cuda_.DescribeLive();
  }
}

TEST_F(CudaDestinationTest, ReadBuffersArePinnedAndGivenBack) {
  const CudaContext context = *CudaContext::Retain(cuda_, 0);
  CudaBuffers buffers(context);
  const auto buffer = buffers.Allocate(8192);
  ASSERT_THAT(buffer, IsOk());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % 4096, 0u);
  cuda_.Fail("cuMemHostAlloc", kCudaOutOfMemory);
  EXPECT_THAT(buffers.Allocate(8192), StatusIs(Reason::kMemoryExhausted, HasSubstr("8192 bytes")));
}

}  // namespace
}  // namespace weightbroker
