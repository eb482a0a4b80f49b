// Tensors are digested on the GPU as they become whole, and none of them before.

#include "common/load/landed_digests.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/fake_cuda_driver.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using testing::FakeCudaDriver;
using testing::IsOk;

constexpr int64_t kTensorBytes = 4096;

class LandedDigestsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasGpuKernels()) GTEST_SKIP() << "this build has no GPU kernels";
    context_ = *CudaContext::Retain(cuda_, 0);
    digester_.emplace(*GpuDigester::Create(context_));
  }
  void TearDown() override {
    landed_.reset();
    digester_.reset();
    context_ = {};
    EXPECT_EQ(cuda_.live_objects(), 0) << cuda_.DescribeLive();
  }

  // A tensor of U8 in which so many elements land.
  int32_t AddTensor(int64_t elements) {
    TensorPlacement tensor;
    tensor.name = "t" + std::to_string(plan_.tensors.size());
    tensor.dtype = FindDtype("U8");
    tensor.size_bytes = kTensorBytes;
    if (elements > 0) tensor.pieces.push_back({.run_elements = elements});
    plan_.tensors.push_back(tensor);
    return static_cast<int32_t>(plan_.tensors.size() - 1);
  }

  void Begin(int64_t batch_bytes) {
    memory_.assign(plan_.tensors.size() * kTensorBytes / sizeof(uint64_t), 0);
    std::vector<GpuRange> places;
    for (size_t i = 0; i < plan_.tensors.size(); ++i) {
      places.push_back({reinterpret_cast<CudaDevicePtr>(BytesOf(i).data()), kTensorBytes});
    }
    auto landed = LandedDigests::Create(plan_, std::move(places), *digester_, batch_bytes);
    ASSERT_THAT(landed, IsOk());
    landed_ = *std::move(landed);
    launches_before_ = cuda_.CallCount("cuLaunchKernel");
  }

  std::span<std::byte> BytesOf(size_t tensor) {
    return std::as_writable_bytes(std::span(memory_)).subspan(tensor * kTensorBytes, kTensorBytes);
  }
  void Fill(int32_t tensor, size_t from, size_t size) {
    for (std::byte& b : BytesOf(static_cast<size_t>(tensor)).subspan(from, size)) b = std::byte{++last_};
  }
  absl::Status Land(int32_t tensor, int64_t elements) {
    const LandedDigests::Arrival arrival = {tensor, elements};
    return landed_->Landed({&arrival, 1});
  }
  void FillAndLand(int32_t tensor) {
    Fill(tensor, 0, kTensorBytes);
    EXPECT_THAT(Land(tensor, kTensorBytes), IsOk());
  }
  int Launches() { return cuda_.CallCount("cuLaunchKernel") - launches_before_; }

  void ExpectDigests() {
    const auto digests = landed_->Finish();
    ASSERT_THAT(digests, IsOk());
    ASSERT_EQ(digests->size(), plan_.tensors.size());
    for (size_t i = 0; i < digests->size(); ++i) {
      EXPECT_EQ(DigestHex((*digests)[i]), DigestHex(ComputeDigest(BytesOf(i)))) << plan_.tensors[i].name;
    }
  }

  FakeCudaDriver cuda_;
  CudaContext context_;
  std::optional<GpuDigester> digester_;
  ShardPlan plan_;
  std::vector<uint64_t> memory_;
  std::unique_ptr<LandedDigests> landed_;
  int launches_before_ = 0;
  uint8_t last_ = 0;
};

TEST_F(LandedDigestsTest, ATensorIsDigestedOnceItIsWholeAndTheOthersAtTheEnd) {
  const int32_t first = AddTensor(kTensorBytes);
  const int32_t second = AddTensor(kTensorBytes);
  AddTensor(0);  // nothing lands in it
  Begin(/*batch_bytes=*/1);
  Fill(second, 0, 1000);
  EXPECT_THAT(Land(second, 1000), IsOk());
  EXPECT_EQ(Launches(), 0) << "the rest may still come";
  Fill(second, 1000, kTensorBytes - 1000);
  EXPECT_THAT(Land(second, kTensorBytes - 1000), IsOk());
  EXPECT_EQ(Launches(), 1);
  FillAndLand(first);
  EXPECT_EQ(Launches(), 2);
  ExpectDigests();
  EXPECT_EQ(Launches(), 3);
}

TEST_F(LandedDigestsTest, ATensorIsWholeWithThoseElementsThatLandInIt) {
  const int32_t padded = AddTensor(1000);  // of 4,096: the rest is zero
  Begin(/*batch_bytes=*/1);
  Fill(padded, 0, 1000);
  EXPECT_THAT(Land(padded, 1000), IsOk());
  EXPECT_EQ(Launches(), 1);
  ExpectDigests();
  EXPECT_EQ(Launches(), 1);
}

TEST_F(LandedDigestsTest, SeveralAreDigestedTogether) {
  for (int i = 0; i < 5; ++i) AddTensor(kTensorBytes);
  Begin(/*batch_bytes=*/2 * kTensorBytes);
  for (int32_t i = 0; i < 5; ++i) {
    FillAndLand(i);
  }
  EXPECT_EQ(Launches(), 2);
  ExpectDigests();
  EXPECT_EQ(Launches(), 3);
}

TEST_F(LandedDigestsTest, AnAliasHasTheDigestOfItsTarget) {
  const int32_t target = AddTensor(kTensorBytes);
  const int32_t alias = AddTensor(0);
  plan_.tensors[static_cast<size_t>(alias)].alias_of = plan_.tensors[static_cast<size_t>(target)].name;
  Begin(/*batch_bytes=*/1);
  FillAndLand(target);
  const auto digests = landed_->Finish();
  ASSERT_THAT(digests, IsOk());
  EXPECT_EQ((*digests)[0], (*digests)[1]);
  EXPECT_EQ(DigestHex((*digests)[0]), DigestHex(ComputeDigest(BytesOf(0))));
}

TEST_F(LandedDigestsTest, PartsLandFromSeveralThreads) {
  constexpr int kTensors = 16;
  constexpr int kThreads = 4;
  for (int i = 0; i < kTensors; ++i) AddTensor(kTensorBytes);
  Begin(/*batch_bytes=*/1);
  for (int32_t i = 0; i < kTensors; ++i) Fill(i, 0, kTensorBytes);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int32_t i = 0; i < kTensors; ++i) EXPECT_THAT(Land(i, kTensorBytes / kThreads), IsOk());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Launches(), kTensors);
  ExpectDigests();
}

TEST_F(LandedDigestsTest, AnErrorOfTheGpuIsReported) {
  const int32_t tensor = AddTensor(kTensorBytes);
  Begin(/*batch_bytes=*/1);
  cuda_.Fail("cuLaunchKernel", kCudaIllegalAddress);
  EXPECT_THAT(Land(tensor, kTensorBytes),
              testing::StatusIs(Reason::kCudaError, ::testing::HasSubstr("cuLaunchKernel")));
}

}  // namespace
}  // namespace weightbroker
