#include "common/memory/huge_pages.h"

#include <gtest/gtest.h>

#include "common/memory/host_slab.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::weightbroker::testing::IsOk;

// Whatever pages this machine gives. One part is left out: nobody has used it.
TEST(HugePages, AreCountedAlikeByBothWays) {
  auto slab = HostSlab::Create(16 * kHugePageBytes);
  ASSERT_THAT(slab, IsOk());
  if (slab->page_kind() == v1::PAGE_KIND_HUGETLB) GTEST_SKIP() << "smaps counts no reserved pages";
  ASSERT_THAT(slab->Populate(0, 3 * kHugePageBytes), IsOk());
  ASSERT_THAT(slab->Populate(8 * kHugePageBytes, kHugePageBytes), IsOk());
  const std::byte* const data = slab->writable_bytes().data();

  const auto scanned = ScanHugeBytes(data, slab->size_bytes());

  if (!scanned.has_value()) GTEST_SKIP() << "this kernel has no PAGEMAP_SCAN";
  EXPECT_EQ(*scanned, HugeBytesOfSmaps(data, slab->size_bytes()));
  EXPECT_EQ(HugeMappedBytes(data, slab->size_bytes()), *scanned);
  EXPECT_LE(*scanned, 4 * kHugePageBytes);
}

TEST(HugePages, AreFoundHoweverManyPartsTheyAreIn) {
  constexpr int64_t kParts = 100;
  auto slab = HostSlab::Create(2 * kParts * kHugePageBytes);
  ASSERT_THAT(slab, IsOk());
  if (slab->page_kind() != v1::PAGE_KIND_TRANSPARENT_HUGE) GTEST_SKIP() << "no transparent huge pages here";
  for (int64_t i = 0; i < kParts; ++i) ASSERT_THAT(slab->Populate(2 * i * kHugePageBytes, kHugePageBytes), IsOk());
  const std::byte* const data = slab->writable_bytes().data();
  const auto scanned = ScanHugeBytes(data, slab->size_bytes());
  if (!scanned.has_value()) GTEST_SKIP() << "this kernel has no PAGEMAP_SCAN";
  EXPECT_EQ(*scanned, HugeBytesOfSmaps(data, slab->size_bytes()));
}

}  // namespace
}  // namespace weightbroker
