#include "common/memory/host_slab.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;

constexpr int64_t kSize = 3 * 4096;
constexpr uid_t kNobody = 65534;

SealedSlab MakeSealedSlab(int64_t size_bytes, std::byte fill) {
  auto slab = HostSlab::Create(size_bytes);
  EXPECT_THAT(slab, IsOk());
  EXPECT_THAT(slab->Populate(0, slab->size_bytes()), IsOk());
  std::fill(slab->writable_bytes().begin(), slab->writable_bytes().end(), fill);
  auto sealed = std::move(*slab).Seal();
  EXPECT_THAT(sealed, IsOk());
  return *std::move(sealed);
}

std::string ProcPath(int fd) { return "/proc/self/fd/" + std::to_string(fd); }

// Runs `body` in a child, as `uid` if this process may change it, and returns what it returns (at most 255).
int RunInChild(uid_t uid, const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    if (geteuid() == 0 && uid != 0 && (setgid(kNobody) != 0 || setuid(uid) != 0)) _exit(99);
    _exit(body());
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

// Tries everything that would let a holder of `fd` change the slab or take away its protection. 0 if all is refused,
// else the number of what was not.
int TryToWrite(int fd, int64_t size_bytes) {
  const auto size = static_cast<size_t>(size_bytes);
  if (write(fd, "x", 1) >= 0) return 1;
  if (pwrite(fd, "x", 1, 0) >= 0) return 2;
  if (mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) != MAP_FAILED) return 3;
  if (ftruncate(fd, 0) == 0) return 4;
  if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, size_bytes) == 0) return 5;
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) == 0) return 6;
  void* const mapping = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  if (mapping == MAP_FAILED) return 7;
  if (mprotect(mapping, size, PROT_READ | PROT_WRITE) == 0) return 8;
  if (madvise(mapping, size, MADV_REMOVE) == 0) return 9;
  munmap(mapping, size);
  return 0;
}

TEST(HostSlab, KeepsWhatWasWrittenOnceItIsSealed) {
  auto slab = HostSlab::Create(kSize);
  ASSERT_THAT(slab, IsOk());
  ASSERT_EQ(slab->writable_bytes().size(), static_cast<size_t>(kSize));
  EXPECT_EQ(slab->writable_bytes()[100], std::byte{0});
  slab->writable_bytes()[100] = std::byte{42};

  const auto sealed = std::move(*slab).Seal();

  ASSERT_THAT(sealed, IsOk());
  EXPECT_THAT(CheckSealedMemfd(sealed->fd.get(), kSize), IsOk());
  std::byte value{};
  ASSERT_EQ(pread(sealed->fd.get(), &value, 1, 100), 1);
  EXPECT_EQ(value, std::byte{42});
}

TEST(HostSlab, RoundsItsSizeUpToThePage) {
  auto slab = HostSlab::Create(1);
  ASSERT_THAT(slab, IsOk());
  EXPECT_EQ(slab->size_bytes(), sysconf(_SC_PAGESIZE));
}

TEST(HostSlab, LetsNobodyWriteOnceItIsSealedNotEvenItsMaker) {
  const SealedSlab sealed = MakeSealedSlab(kSize, std::byte{1});

  EXPECT_EQ(RunInChild(geteuid(), [&] { return TryToWrite(sealed.fd.get(), kSize); }), 0);
}

TEST(HostSlab, StaysSealedWhenItsMakerReopensItForWriting) {
  const SealedSlab sealed = MakeSealedSlab(kSize, std::byte{1});
  // Root, and whoever gives himself the permission first, may open it; the seals hold all the same.
  fchmod(sealed.fd.get(), 0600);
  const UniqueFd writable(open(ProcPath(sealed.fd.get()).c_str(), O_RDWR));
  ASSERT_TRUE(writable.valid());

  EXPECT_EQ(TryToWrite(writable.get(), kSize), 0);
}

TEST(HostSlab, CanBeMappedButNotReopenedByAnotherUser) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  const SealedSlab sealed = MakeSealedSlab(kSize, std::byte{7});

  EXPECT_EQ(RunInChild(kNobody,
                       [&] {
                         const void* const mapping = mmap(nullptr, kSize, PROT_READ, MAP_SHARED, sealed.fd.get(), 0);
                         if (mapping == MAP_FAILED) return 1;
                         if (*static_cast<const std::byte*>(mapping) != std::byte{7}) return 2;
                         if (open(ProcPath(sealed.fd.get()).c_str(), O_RDWR) >= 0) return 3;
                         if (fchmod(sealed.fd.get(), 0666) == 0) return 4;
                         return TryToWrite(sealed.fd.get(), kSize) == 0 ? 0 : 5;
                       }),
            0);
}

TEST(HostSlab, EndsTheProcessThatWritesToItsMapping) {
  const SealedSlab sealed = MakeSealedSlab(kSize, std::byte{7});
  EXPECT_DEATH(
      {
        void* const mapping = mmap(nullptr, kSize, PROT_READ, MAP_SHARED, sealed.fd.get(), 0);
        *static_cast<volatile char*>(mapping) = 1;
      },
      "");
}

TEST(HostSlab, IsOwnedByModeFourHundred) {
  const SealedSlab sealed = MakeSealedSlab(kSize, std::byte{7});
  struct stat status {};
  ASSERT_EQ(fstat(sealed.fd.get(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0400u);
}

TEST(HostSlab, HasItsPagesOncePopulatedAndGivesThemBackUnlessSealed) {
  constexpr int64_t kMany = 16 << 20;
  auto slab = HostSlab::Create(kMany);
  ASSERT_THAT(slab, IsOk());
  const auto resident_pages = [&] {
    std::vector<unsigned char> present(kMany / 4096);
    EXPECT_EQ(mincore(slab->writable_bytes().data(), kMany, present.data()), 0);
    return std::count_if(present.begin(), present.end(), [](unsigned char flags) { return (flags & 1) != 0; });
  };
  EXPECT_EQ(resident_pages(), 0);

  ASSERT_THAT(slab->Populate(8 << 20, 4 << 20), IsOk());

  EXPECT_EQ(resident_pages(), (4 << 20) / 4096);
}

TEST(HostSlab, PopulatesUpToItsEndWhenAskedForAnythingUnaligned) {
  auto slab = HostSlab::Create(kSize);
  ASSERT_THAT(slab, IsOk());
  EXPECT_THAT(slab->Populate(kSize - 1, 1), IsOk());
  EXPECT_THAT(slab->Populate(0, 0), IsOk());
}

TEST(HostSlab, WritesPartsOneAfterTheOtherWhateverTheirNumberAndSize) {
  auto slab = HostSlab::Create(1 << 20);
  ASSERT_THAT(slab, IsOk());
  std::vector<std::byte> source(100'000);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 7);
  std::vector<std::span<const std::byte>> parts;
  for (size_t at = 0; at < source.size();) {
    const size_t size = std::min(at % 3 == 0 ? size_t{0} : at % 97, source.size() - at);
    parts.push_back(std::span(source).subspan(at, size));
    parts.push_back(std::span(source).subspan(at + size, std::min<size_t>(1, source.size() - at - size)));
    at += size + parts.back().size();
  }
  ASSERT_GT(parts.size(), 2048u) << "more than one call of the system takes";

  ASSERT_THAT(slab->Write(5000, parts), IsOk());

  const auto written = slab->writable_bytes();
  EXPECT_TRUE(std::equal(source.begin(), source.end(), written.begin() + 5000));
  EXPECT_EQ(written[4999], std::byte{0});
  EXPECT_EQ(written[105'000], std::byte{0});
}

TEST(HostSlab, WritesFromSeveralThreadsToTheSamePage) {
  auto slab = HostSlab::Create(1 << 20);
  ASSERT_THAT(slab, IsOk());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&slab, t] {
      const std::vector<std::byte> value(100, static_cast<std::byte>(t + 1));
      const std::span<const std::byte> parts[] = {value};
      for (int64_t at = t * 100; at + 100 <= (1 << 20); at += 400) EXPECT_THAT(slab->Write(at, parts), IsOk());
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t at = 0; at < (1 << 20) / 400 * 400; ++at) {
    ASSERT_EQ(slab->writable_bytes()[at], static_cast<std::byte>(at / 100 % 4 + 1)) << at;
  }
}

TEST(HostSlab, RefusesMoreThanThereIsNamingNeedAndHave) {
  const int64_t far_too_much = int64_t{1} << 50;
  const auto slab = HostSlab::Create(far_too_much);

  EXPECT_THAT(slab, StatusIs(Reason::kMemoryExhausted, HasSubstr("1125899906842624 bytes")));
  EXPECT_THAT(slab, HasMetadata("need_bytes", std::to_string(far_too_much)));
}

TEST(HostSlab, RefusesNoBytesAtAll) { EXPECT_THAT(HostSlab::Create(0), StatusIs(Reason::kInvalidArgument)); }

TEST(HostSlab, SaysWhatPagesItGot) {
  constexpr int64_t kLarge = 32 << 20;
  const v1::PageKind probed = ProbeHostPageKind(kLarge);
  const SealedSlab sealed = MakeSealedSlab(kLarge, std::byte{3});
  // Of transparent huge pages there may be too few.
  EXPECT_TRUE(sealed.page_kind == probed ||
              (probed == v1::PAGE_KIND_TRANSPARENT_HUGE && sealed.page_kind == v1::PAGE_KIND_BASE));
}

TEST(HostSlab, SaysWhatPagesItGotWhenItWasWritten) {
  constexpr int64_t kLarge = 32 << 20;
  const v1::PageKind populated = MakeSealedSlab(kLarge, std::byte{3}).page_kind;
  auto slab = HostSlab::Create(kLarge);
  ASSERT_THAT(slab, IsOk());
  const std::vector<std::byte> bytes(kLarge, std::byte{3});
  const std::span<const std::byte> parts[] = {bytes};
  ASSERT_THAT(slab->Write(0, parts), IsOk());
  const auto sealed = std::move(*slab).Seal();
  ASSERT_THAT(sealed, IsOk());
  EXPECT_EQ(sealed->page_kind, populated);
}

TEST(HostSlab, PrefersWriteWhereItNeedNotClearPages) {
  const auto slab = HostSlab::Create(32 << 20);
  ASSERT_THAT(slab, IsOk());
  const bool huge = slab->page_kind() == v1::PAGE_KIND_TRANSPARENT_HUGE && WritesTakeHugePages();
  EXPECT_EQ(slab->PrefersWrite(), huge || slab->page_kind() == v1::PAGE_KIND_BASE);
}

TEST(HostSlab, ReportsBasePagesWhereNothingWasPopulatedInHugeOnes) {
  auto slab = HostSlab::Create(32 << 20);
  ASSERT_THAT(slab, IsOk());
  if (slab->page_kind() != v1::PAGE_KIND_TRANSPARENT_HUGE) GTEST_SKIP() << "no transparent huge pages here";
  const auto sealed = std::move(*slab).Seal();
  ASSERT_THAT(sealed, IsOk());
  EXPECT_EQ(sealed->page_kind, v1::PAGE_KIND_BASE);
}

TEST(HostSlab, LetsNobodyWriteToReservedHugePagesEither) {
  constexpr int64_t kHuge = 2 * kHugePageBytes;
  if (ProbeHostPageKind(kHuge) != v1::PAGE_KIND_HUGETLB) GTEST_SKIP() << "no huge pages are reserved here";
  const SealedSlab sealed = MakeSealedSlab(kHuge, std::byte{3});
  EXPECT_EQ(sealed.page_kind, v1::PAGE_KIND_HUGETLB);
  EXPECT_THAT(CheckSealedMemfd(sealed.fd.get(), kHuge), IsOk());
  EXPECT_EQ(RunInChild(kNobody, [&] { return TryToWrite(sealed.fd.get(), kHuge); }), 0);
}

TEST(SealedMemfd, HoldsItsContentsAndRefusesEveryChange) {
  const std::string contents = "a manifest";
  const auto fd = CreateSealedMemfd("test", std::as_bytes(std::span(contents)));
  ASSERT_THAT(fd, IsOk());

  std::string read(contents.size(), ' ');
  ASSERT_EQ(pread(fd->get(), read.data(), read.size(), 0), static_cast<ssize_t>(read.size()));
  EXPECT_EQ(read, contents);
  EXPECT_THAT(CheckSealedMemfd(fd->get(), static_cast<int64_t>(contents.size())), IsOk());
  EXPECT_EQ(RunInChild(geteuid(), [&] { return TryToWrite(fd->get(), static_cast<int64_t>(contents.size())); }), 0);
}

TEST(SealedMemfd, IsRefusedByAReceiverIfItHasAnotherSize) {
  const SealedSlab sealed = MakeSealedSlab(kSize, std::byte{1});
  EXPECT_THAT(CheckSealedMemfd(sealed.fd.get(), kSize + 1), StatusIs(Reason::kProtocolError, HasSubstr("12288")));
}

TEST(SealedMemfd, IsRefusedByAReceiverIfItIsNoMemfd) {
  const UniqueFd null(open("/dev/null", O_RDONLY));
  EXPECT_THAT(CheckSealedMemfd(null.get(), 0), StatusIs(Reason::kProtocolError, HasSubstr("no memfd")));
}

TEST(SealedMemfd, IsRefusedByAReceiverNamingEachSealThatIsMissing) {
  const UniqueFd fd(memfd_create("test", MFD_ALLOW_SEALING));
  ASSERT_EQ(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_THAT(CheckSealedMemfd(fd.get(), 0),
              HasMetadata("missing_seals", "F_SEAL_GROW|F_SEAL_FUTURE_WRITE|F_SEAL_SEAL"));
}

TEST(SealedMemfd, IsRefusedByAReceiverIfItCanStillBeWrittenThrough) {
  const UniqueFd fd(memfd_create("test", MFD_ALLOW_SEALING));
  ASSERT_EQ(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL), 0);
  EXPECT_THAT(CheckSealedMemfd(fd.get(), 0), StatusIs(Reason::kProtocolError, HasSubstr("reading only")));
}

}  // namespace
}  // namespace weightbroker
