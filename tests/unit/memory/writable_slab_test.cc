#include "common/memory/writable_slab.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <utility>

#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using testing::IsOk;
using testing::StatusIs;

TEST(WritableSlab, HasAFixedLengthWhileItIsWrittenTo) {
  const auto slab = WritableSlab::Create(5000);
  ASSERT_THAT(slab, IsOk());
  EXPECT_EQ(slab->size_bytes(), 8192);
  EXPECT_THAT(CheckWritableMemfd(slab->fd(), 8192), IsOk());
  EXPECT_NE(ftruncate(slab->fd(), 4096), 0);
  EXPECT_NE(ftruncate(slab->fd(), 16384), 0);
}

TEST(WritableSlab, SaysHowMuchOfItHasBeenWritten) {
  const auto slab = WritableSlab::Create(1 << 20);
  ASSERT_THAT(slab, IsOk());
  EXPECT_EQ(slab->filled_bytes(), 0);
  ASSERT_EQ(pwrite(slab->fd(), "x", 1, 8192), 1);
  EXPECT_GE(slab->filled_bytes(), 4096);
}

TEST(WritableSlab, IsSealedOnlyOnceNobodyHasItMappedWritable) {
  auto slab = WritableSlab::Create(4096);
  ASSERT_THAT(slab, IsOk());
  void* const mapped = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, slab->fd(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  EXPECT_THAT(slab->Seal(), StatusIs(Reason::kStillWritable));
  munmap(mapped, 4096);
  EXPECT_THAT(slab->Seal(), IsOk());
  EXPECT_THAT(slab->Seal(), IsOk());
  EXPECT_EQ(pwrite(slab->fd(), "x", 1, 0), -1);
  auto sealed = std::move(*slab).Finish();
  ASSERT_THAT(sealed, IsOk());
  EXPECT_THAT(CheckSealedMemfd(sealed->fd.get(), 4096), IsOk());
}

TEST(WritableSlab, IsNotHandedOutAsSealedWhileItIsNot) {
  auto slab = WritableSlab::Create(4096);
  ASSERT_THAT(slab, IsOk());
  EXPECT_THAT(std::move(*slab).Finish(), StatusIs(Reason::kStillWritable));
}

TEST(WritableSlab, RefusesSizesThatCannotBe) {
  EXPECT_THAT(WritableSlab::Create(0), StatusIs(Reason::kInvalidArgument));
  EXPECT_THAT(WritableSlab::Create(int64_t{1} << 60), StatusIs(Reason::kMemoryExhausted));
}

TEST(WritableSlab, TellsOthersDescriptorsFromItsOwnKind) {
  auto slab = WritableSlab::Create(4096);
  ASSERT_THAT(slab, IsOk());
  EXPECT_THAT(CheckWritableMemfd(slab->fd(), 8192), StatusIs(Reason::kProtocolError));
  ASSERT_THAT(slab->Seal(), IsOk());
  EXPECT_THAT(CheckWritableMemfd(slab->fd(), 4096), StatusIs(Reason::kProtocolError));
  const UniqueFd plain(memfd_create("plain", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(plain.get(), 4096), 0);
  EXPECT_THAT(CheckWritableMemfd(plain.get(), 4096), StatusIs(Reason::kProtocolError));
}

}  // namespace
}  // namespace weightbroker
