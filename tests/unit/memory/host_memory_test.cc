#include "common/memory/host_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>

namespace weightbroker {
namespace {

using ::testing::StrEq;

constexpr int64_t kMiB = 1 << 20;

using Files = std::map<std::string, std::string>;  // path -> contents

// A folder that looks like / to what reads the kernel's files.
class FakeSystem {
 public:
  explicit FakeSystem(const Files& files) {
    std::string pattern = std::filesystem::temp_directory_path() / "weightbroker-fake-system-XXXXXX";
    root_ = mkdtemp(pattern.data());
    for (const auto& [path, text] : files) {
      std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
      std::ofstream(root_ + path) << text;
    }
  }
  ~FakeSystem() { std::filesystem::remove_all(root_); }
  FakeSystem(const FakeSystem&) = delete;
  FakeSystem& operator=(const FakeSystem&) = delete;

  const std::string& root() const { return root_; }

 private:
  std::string root_;
};

constexpr char kMemInfo[] = "MemTotal:       8192 kB\nMemFree:        100 kB\nMemAvailable:   4096 kB\n";
constexpr char kV2Mount[] = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
constexpr char kV1Mount[] = "35 25 0:30 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n";

TEST(HostMemory, IsWhatTheMachineHasAvailableWithoutACgroup) {
  const FakeSystem system(Files{{"/proc/meminfo", kMemInfo}});
  const HostMemory memory = ReadHostMemory(system.root());
  EXPECT_EQ(memory.available_bytes, 4 * kMiB);
  EXPECT_THAT(memory.limited_by, StrEq("machine"));
}

TEST(HostMemory, IsLimitedByACgroupOfVersionTwoWhosePageCacheCouldGo) {
  const FakeSystem system(Files{{"/proc/meminfo", kMemInfo},
                                {"/proc/self/mountinfo", kV2Mount},
                                {"/proc/self/cgroup", "0::/weights.slice/weightbroker.service\n"},
                                {"/sys/fs/cgroup/weights.slice/weightbroker.service/memory.max", "3145728\n"},
                                {"/sys/fs/cgroup/weights.slice/weightbroker.service/memory.current", "2097152\n"},
                                {"/sys/fs/cgroup/weights.slice/weightbroker.service/memory.stat",
                                 "anon 1048576\nfile 1048576\ninactive_file 524288\nactive_file 524288\n"}});
  const HostMemory memory = ReadHostMemory(system.root());
  EXPECT_EQ(memory.available_bytes, 2 * kMiB);
  EXPECT_THAT(memory.limited_by, StrEq("cgroup"));
}

TEST(HostMemory, IsInAllWhatTheMachineHasOrACgroupLimitsItTo) {
  EXPECT_EQ(ReadHostMemoryTotal(FakeSystem(Files{{"/proc/meminfo", kMemInfo}}).root()), 8 * kMiB);
  const FakeSystem system(Files{{"/proc/meminfo", kMemInfo},
                                {"/proc/self/mountinfo", kV2Mount},
                                {"/proc/self/cgroup", "0::/weights.slice/weightbroker.service\n"},
                                {"/sys/fs/cgroup/weights.slice/memory.max", "max\n"},
                                {"/sys/fs/cgroup/weights.slice/weightbroker.service/memory.max", "3145728\n"},
                                {"/sys/fs/cgroup/weights.slice/weightbroker.service/memory.current", "2097152\n"}});
  EXPECT_EQ(ReadHostMemoryTotal(system.root()), 3 * kMiB);
}

TEST(HostMemory, IsLimitedByACgroupAboveThisProcess) {
  const FakeSystem system(Files{{"/proc/meminfo", kMemInfo},
                                {"/proc/self/mountinfo", kV2Mount},
                                {"/proc/self/cgroup", "0::/outer/inner\n"},
                                {"/sys/fs/cgroup/outer/memory.max", "1048576\n"},
                                {"/sys/fs/cgroup/outer/memory.current", "1000000\n"},
                                {"/sys/fs/cgroup/outer/inner/memory.max", "max\n"},
                                {"/sys/fs/cgroup/outer/inner/memory.current", "1000000\n"}});
  EXPECT_EQ(ReadHostMemory(system.root()).available_bytes, 48576);
}

TEST(HostMemory, IsNeverLessThanNothing) {
  const FakeSystem system(Files{{"/proc/meminfo", kMemInfo},
                                {"/proc/self/mountinfo", kV2Mount},
                                {"/proc/self/cgroup", "0::/a\n"},
                                {"/sys/fs/cgroup/a/memory.max", "1000\n"},
                                {"/sys/fs/cgroup/a/memory.current", "5000\n"}});
  EXPECT_EQ(ReadHostMemory(system.root()).available_bytes, 0);
}

TEST(HostMemory, IsLimitedByACgroupOfVersionOne) {
  const FakeSystem system(Files{{"/proc/meminfo", kMemInfo},
                                {"/proc/self/mountinfo", kV1Mount},
                                {"/proc/self/cgroup", "5:cpu,cpuacct:/elsewhere\n4:memory:/job\n0::/\n"},
                                {"/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "2097152\n"},
                                {"/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "1048576\n"},
                                {"/sys/fs/cgroup/memory/job/memory.stat", "cache 0\ntotal_inactive_file 1024\n"}});
  const HostMemory memory = ReadHostMemory(system.root());
  EXPECT_EQ(memory.available_bytes, kMiB + 1024);
  EXPECT_THAT(memory.limited_by, StrEq("cgroup"));
}

TEST(HostMemory, IsFoundInsideAContainerWhoseMountShowsItsOwnCgroupOnly) {
  const FakeSystem system(
      Files{{"/proc/meminfo", kMemInfo},
            {"/proc/self/mountinfo", "35 25 0:30 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"},
            {"/proc/self/cgroup", "4:memory:/docker/abc\n"},
            {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "1048576\n"},
            {"/sys/fs/cgroup/memory/memory.usage_in_bytes", "0\n"}});
  EXPECT_EQ(ReadHostMemory(system.root()).available_bytes, kMiB);
}

TEST(HostMemory, IsReadFromThisMachine) { EXPECT_GT(ReadHostMemory().available_bytes, 0); }

Files HugePageFiles(const std::string& free, const std::string& promised, const std::string& shmem_enabled) {
  return {{"/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", free},
          {"/sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", promised},
          {"/sys/kernel/mm/transparent_hugepage/shmem_enabled", shmem_enabled}};
}

TEST(HostPageKind, IsReservedHugePagesIfEnoughAreFreeAndNotPromised) {
  const FakeSystem system(HugePageFiles("5", "2", "always within_size advise [never] deny force"));
  EXPECT_EQ(ProbeHostPageKind(3 * kHugePageBytes, system.root()), v1::PAGE_KIND_HUGETLB);
  EXPECT_EQ(ProbeHostPageKind(3 * kHugePageBytes + 1, system.root()), v1::PAGE_KIND_BASE);
}

TEST(HostPageKind, IsTransparentHugePagesWhereverTheSystemAllowsThemForSharedMemory) {
  for (const char* word : {"always", "within_size", "advise", "force"}) {
    const FakeSystem system(HugePageFiles("0", "0", std::string("x [") + word + "] y"));
    EXPECT_EQ(ProbeHostPageKind(kHugePageBytes, system.root()), v1::PAGE_KIND_TRANSPARENT_HUGE) << word;
  }
  for (const char* word : {"never", "deny"}) {
    const FakeSystem system(HugePageFiles("0", "0", std::string("x [") + word + "] y"));
    EXPECT_EQ(ProbeHostPageKind(kHugePageBytes, system.root()), v1::PAGE_KIND_BASE) << word;
  }
}

TEST(HostPageKind, WritesTakeHugePagesWhereNoMappingMustAskForThem) {
  const auto writes_take = [](const std::string& word) {
    return WritesTakeHugePages(FakeSystem(HugePageFiles("0", "0", "x [" + word + "] y")).root());
  };
  for (const char* word : {"always", "within_size", "force"}) EXPECT_TRUE(writes_take(word)) << word;
  for (const char* word : {"advise", "never", "deny"}) EXPECT_FALSE(writes_take(word)) << word;
}

TEST(HostPageKind, HeedsTheSettingForTwoMebibytesBeforeTheGeneralOne) {
  auto files = HugePageFiles("0", "0", "always within_size [advise] never deny force");
  files["/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/shmem_enabled"] =
      "always inherit within_size advise [never]";
  EXPECT_EQ(ProbeHostPageKind(kHugePageBytes, FakeSystem(files).root()), v1::PAGE_KIND_BASE);
  files["/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/shmem_enabled"] =
      "always [inherit] within_size advise never";
  EXPECT_EQ(ProbeHostPageKind(kHugePageBytes, FakeSystem(files).root()), v1::PAGE_KIND_TRANSPARENT_HUGE);
}

TEST(HostPageKind, IsBasePagesForLessThanOneHugePage) {
  const FakeSystem system(HugePageFiles("5", "0", "[always]"));
  EXPECT_EQ(ProbeHostPageKind(kHugePageBytes - 1, system.root()), v1::PAGE_KIND_BASE);
}

}  // namespace
}  // namespace weightbroker
