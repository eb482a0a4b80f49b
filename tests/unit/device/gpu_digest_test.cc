#include "common/device/gpu_digest.h"

#include <gtest/gtest.h>

#include <random>

#include "common/device/kernels/digest_tiles.h"
#include "common/memory/digest.h"
#include "tests/support/fake_cuda_driver.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using testing::FakeCudaDriver;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;

std::vector<std::byte> RandomBytes(int64_t size_bytes, uint32_t seed) {
  std::vector<std::byte> bytes(static_cast<size_t>(size_bytes));
  std::mt19937_64 random(seed);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

class GpuDigestTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasGpuKernels()) GTEST_SKIP() << "this build has no GPU kernels";
  }
  void TearDown() override { EXPECT_EQ(cuda_.live_objects(), 0) << cuda_.DescribeLive(); }

  CudaContext Context() { return *CudaContext::Retain(cuda_, 0); }

  FakeCudaDriver cuda_;
};

TEST_F(GpuDigestTest, IsThatOfTheCpuForEverySizeAndPlace) {
  constexpr int64_t kTile = wbd1::kDigestTileBytes;
  const std::vector<int64_t> sizes = {
      0, 1, 7, 8, 9, 1000, 2048, 4095, 0, kTile - 1, kTile, kTile + 1, 3 * kTile, 3 * kTile + 13, 16384, 5 * kTile, 0};
  std::vector<std::vector<std::byte>> contents;
  std::vector<GpuRange> ranges;
  for (const int64_t size : sizes) {
    contents.push_back(RandomBytes(size + 8, static_cast<uint32_t>(size)));
    // Every other one lies at a multiple of 8 that is none of 16.
    const uint64_t at = (reinterpret_cast<uint64_t>(contents.back().data()) + 7) / 8 * 8;
    ranges.push_back({at, size});
  }
  const auto digester = GpuDigester::Create(Context());
  ASSERT_THAT(digester, IsOk());
  const auto digests = digester->Compute(ranges);
  ASSERT_THAT(digests, IsOk());
  for (size_t i = 0; i < ranges.size(); ++i) {
    const auto* const data = reinterpret_cast<const std::byte*>(ranges[i].address);
    EXPECT_EQ(DigestHex((*digests)[i]), DigestHex(ComputeDigest({data, static_cast<size_t>(sizes[i])})))
        << "of " << sizes[i] << " bytes";
  }
}

TEST_F(GpuDigestTest, IsThatOfTheCpuWhereARangeStartsAnywhere) {
  const std::vector<std::byte> bytes = RandomBytes(40'000'000, 7);  // more than a piece of what is copied
  const auto start = (reinterpret_cast<uint64_t>(bytes.data()) + 7) / 8 * 8;
  const std::vector<GpuRange> ranges = {{start + 2, 6}, {start, 100}, {start + 5, 39'999'000}, {start + 1, 0}};
  const auto digester = GpuDigester::Create(Context());
  const auto digests = digester->Compute(ranges);
  ASSERT_THAT(digests, IsOk());
  for (size_t i = 0; i < ranges.size(); ++i) {
    const auto* const data = reinterpret_cast<const std::byte*>(ranges[i].address);
    EXPECT_EQ(DigestHex((*digests)[i]), DigestHex(ComputeDigest({data, static_cast<size_t>(ranges[i].size_bytes)})));
  }
}

TEST_F(GpuDigestTest, OfNothingIsNothing) {
  const auto digester = GpuDigester::Create(Context());
  EXPECT_THAT(digester->Compute({}), IsOk());
  EXPECT_TRUE(digester->Compute({})->empty());
}

TEST_F(GpuDigestTest, ARunHasTheDigestsOfAllThatWasAddedInThatOrder) {
  std::vector<std::vector<std::byte>> contents;
  std::vector<GpuRange> ranges;
  for (const int64_t size : {5000, 0, 3 * (1 << 20), 17, 64}) {
    contents.push_back(RandomBytes(size + 16, static_cast<uint32_t>(size)));
    const uint64_t at = (reinterpret_cast<uint64_t>(contents.back().data()) + 7) / 8 * 8;
    ranges.push_back({at + (size == 17 ? 3 : 0), size});  // one that the host must digest
  }
  const auto digester = GpuDigester::Create(Context());
  auto run = digester->Begin(ranges.size());
  ASSERT_THAT(run, IsOk());
  const std::span<const GpuRange> all(ranges);
  for (const auto part : {all.subspan(3, 2), all.subspan(0, 0), all.subspan(0, 3)}) {
    EXPECT_THAT(run->Add(part), IsOk());
  }
  EXPECT_THAT(run->Add(all.first(1)).message(), HasSubstr("more ranges"));
  const auto digests = run->Finish();
  ASSERT_THAT(digests, IsOk());
  ASSERT_EQ(digests->size(), ranges.size());
  for (size_t i = 0; i < ranges.size(); ++i) {
    const GpuRange& range = ranges[(i + 3) % ranges.size()];
    const auto* const data = reinterpret_cast<const std::byte*>(range.address);
    EXPECT_EQ(DigestHex((*digests)[i]), DigestHex(ComputeDigest({data, static_cast<size_t>(range.size_bytes)})));
  }
}

TEST_F(GpuDigestTest, ARunThatIsGivenUpWaitsForWhatIsUnderWay) {
  const auto digester = GpuDigester::Create(Context());
  const std::vector<std::byte> bytes(64);
  {
    auto run = digester->Begin(1);
    ASSERT_THAT(run, IsOk());
    EXPECT_THAT(run->Add(std::vector<GpuRange>{{reinterpret_cast<uint64_t>(bytes.data()), 64}}), IsOk());
  }
  EXPECT_GE(cuda_.CallCount("cuStreamSynchronize"), 1);
}

TEST_F(GpuDigestTest, AnErrorOfTheGpuIsReportedAndNothingIsLeft) {
  const auto digester = GpuDigester::Create(Context());
  const std::vector<std::byte> bytes(64);
  const std::vector<GpuRange> ranges = {{reinterpret_cast<uint64_t>(bytes.data()), 64}};
  for (const char* call : {"cuStreamCreate", "cuMemAlloc", "cuMemcpyHtoDAsync", "cuMemsetD8Async", "cuLaunchKernel",
                           "cuMemcpyDtoHAsync", "cuStreamSynchronize"}) {
    cuda_.Fail(call, kCudaIllegalAddress);
    EXPECT_THAT(digester->Compute(ranges), StatusIs(Reason::kCudaError, HasSubstr(call)));
    cuda_.StopFailing(call);
  }
}

TEST_F(GpuDigestTest, AGpuThatTheKernelsDoNotRunOnIsNamed) {
  cuda_.Fail("cuModuleLoadData", 209);
  EXPECT_THAT(GpuDigester::Create(Context()), StatusIs(Reason::kDeviceUnsupported, HasSubstr(testing::FakeGpuUuid(1))));
}

}  // namespace
}  // namespace weightbroker
