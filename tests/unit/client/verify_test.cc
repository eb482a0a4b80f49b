#include "client/src/verify.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "common/memory/digest.h"
#include "tests/support/status_matchers.h"
#include "tests/support/thread_limit.h"

namespace weightbroker::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::ThreadLimit;

constexpr size_t kLargeBytes = (40 << 20) + 5;  // several pieces, and not a whole number of words

Tensor View(std::string_view name, const std::vector<std::byte>& bytes) {
  Tensor tensor;
  tensor.name = name;
  tensor.data = bytes.data();
  tensor.size_bytes = static_cast<int64_t>(bytes.size());
  const Digest digest = ComputeDigest(bytes);
  std::transform(digest.begin(), digest.end(), tensor.digest.begin(),
                 [](std::byte byte) { return static_cast<unsigned char>(byte); });
  return tensor;
}

std::vector<std::byte> Pattern(size_t size) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 31 + i / 4096);
  return bytes;
}

TEST(VerifyDigests, PassesRightBytesWhateverTheNumberOfThreads) {
  const auto large = Pattern(kLargeBytes);
  const auto small = Pattern(3);
  const std::vector<std::byte> empty;
  const std::vector<Tensor> tensors = {View("empty", empty), View("large", large), View("small", small)};

  for (const int threads : {1, 2, 7}) EXPECT_THAT(VerifyDigests(tensors, threads), IsOk());
}

TEST(VerifyDigests, ReadsWithTheThreadsThatAreToBeHad) {
  auto large = Pattern(kLargeBytes);
  const std::vector<Tensor> tensors = {View("large", large)};

  for (const int threads : {0, 1}) {
    const ThreadLimit limit(threads);
    EXPECT_THAT(VerifyDigests(tensors, 7), IsOk());
  }
  large[kLargeBytes - 1] ^= std::byte{1};
  const ThreadLimit limit(0);
  EXPECT_THAT(VerifyDigests(tensors, 7), StatusIs(Reason::kDigestMismatch));
}

TEST(VerifyDigests, NamesTheTensorWhoseByteIsWrong) {
  auto large = Pattern(kLargeBytes);
  const auto small = Pattern(3);
  const std::vector<Tensor> tensors = {View("large", large), View("small", small)};
  large[kLargeBytes - 1] ^= std::byte{1};

  EXPECT_THAT(VerifyDigests(tensors, 2),
              AllOf(StatusIs(Reason::kDigestMismatch, HasSubstr("\"large\"")), HasMetadata("tensor", "large")));
}

TEST(VerifyDigests, ReadsAnAliasOnceUnderItsTensorsName) {
  auto bytes = Pattern(100);
  Tensor alias = View("a", bytes);
  alias.alias_of = "z";
  const std::vector<Tensor> tensors = {alias, View("z", bytes)};
  bytes[0] ^= std::byte{1};

  EXPECT_THAT(VerifyDigests(tensors, 1), HasMetadata("tensor", "z"));
}

}  // namespace
}  // namespace weightbroker::client
