#include "common/publish/digest_tensors.h"

#include <gtest/gtest.h>

#include <span>
#include <string>
#include <vector>

#include "tests/support/checkpoint_builder.h"

namespace weightbroker {
namespace {

TEST(DigestTensors, GivesWhatOneThreadGivesForEach) {
  const std::string texts[] = {"", testing::TensorBytes("odd", 13), testing::TensorBytes("large", (40 << 20) + 5)};
  std::vector<std::span<const std::byte>> tensors;
  for (const std::string& text : texts) tensors.push_back(std::as_bytes(std::span(text)));
  for (const int threads : {1, 4}) {
    const std::vector<Digest> digests = DigestTensors(tensors, threads);
    ASSERT_EQ(digests.size(), tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) EXPECT_EQ(digests[i], ComputeDigest(tensors[i])) << i;
  }
}

}  // namespace
}  // namespace weightbroker
