#include "client/src/slab_mapping.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>

#include "common/memory/host_slab.h"
#include "tests/support/status_matchers.h"
#include "tests/support/thread_limit.h"

namespace weightbroker::client {
namespace {

using ::testing::KilledBySignal;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::ThreadLimit;

constexpr int64_t kBytes = 8 << 20;

SealedSlab MakeSlab() {
  auto slab = HostSlab::Create(kBytes);
  EXPECT_THAT(slab, IsOk());
  std::fill(slab->writable_bytes().begin(), slab->writable_bytes().end(), std::byte{42});
  auto sealed = std::move(*slab).Seal();
  EXPECT_THAT(sealed, IsOk());
  return *std::move(sealed);
}

TEST(SlabMapping, IsPrefaultedWithTheThreadsThatAreToBeHad) {
  const SealedSlab slab = MakeSlab();
  const auto mapping = SlabMapping::Map(slab.fd.get(), slab.size_bytes);
  ASSERT_THAT(mapping, IsOk());
  const ThreadLimit limit(1);

  mapping->Prefault(4);

  EXPECT_EQ(mapping->view().data[kBytes - 1], std::byte{42});
}

TEST(SlabMapping, ShowsTheSlabsBytes) {
  const SealedSlab slab = MakeSlab();

  const auto mapping = SlabMapping::Map(slab.fd.get(), slab.size_bytes);

  ASSERT_THAT(mapping, IsOk());
  mapping->Prefault(3);
  EXPECT_EQ(mapping->view().size_bytes, slab.size_bytes);
  EXPECT_EQ(mapping->view().data[0], std::byte{42});
  EXPECT_EQ(mapping->view().data[kBytes - 1], std::byte{42});
}

TEST(SlabMapping, OutlivesTheDescriptorAndMoves) {
  SealedSlab slab = MakeSlab();
  auto mapping = SlabMapping::Map(slab.fd.get(), slab.size_bytes);
  ASSERT_THAT(mapping, IsOk());
  slab.fd.reset();

  const SlabMapping moved = *std::move(mapping);

  EXPECT_EQ(moved.view().data[17], std::byte{42});
}

TEST(SlabMapping, RefusesAFileThatIsShorterThanAnnounced) {
  const SealedSlab slab = MakeSlab();

  EXPECT_THAT(SlabMapping::Map(slab.fd.get(), slab.size_bytes + 4096), StatusIs(Reason::kProtocolError));
}

TEST(SlabMapping, RefusesMemoryThatSomebodyCouldStillShrink) {
  const UniqueFd unsealed(memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(unsealed.get(), kBytes), 0);

  EXPECT_THAT(SlabMapping::Map(unsealed.get(), kBytes), StatusIs(Reason::kProtocolError));
}

TEST(SlabMapping, RefusesADescriptorThatIsNoMemfd) {
  const UniqueFd file(open("/proc/self/exe", O_RDONLY | O_CLOEXEC));

  EXPECT_THAT(SlabMapping::Map(file.get(), 4096), StatusIs(Reason::kProtocolError));
}

TEST(SlabMappingDeathTest, EndsWhoeverWritesToIt) {
  const SealedSlab slab = MakeSlab();
  const auto mapping = SlabMapping::Map(slab.fd.get(), slab.size_bytes);
  ASSERT_THAT(mapping, IsOk());

  EXPECT_EXIT(
      {
        signal(SIGSEGV, SIG_DFL);  // a sanitizer's handler would turn it into an exit
        *const_cast<volatile std::byte*>(mapping->view().data) = std::byte{1};
      },
      KilledBySignal(SIGSEGV), "");
}

}  // namespace
}  // namespace weightbroker::client
