#include "server/broker/keeper_loader_spawner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "common/base/error.h"
#include "common/base/socket.h"
#include "common/process/spawn.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;

constexpr milliseconds kPatience(20'000);

class KeeperLoaderSpawnerTest : public ::testing::Test {
 protected:
  // Plays the keeper: starts a program that sleeps, and tells its end when the test says so.
  absl::StatusOr<KeeperLoader> StartSleeper(int request_fd) {
    request_ = ReadRequest(request_fd);
    auto child = Spawn({.path = "/bin/sleep", .arguments = {"1000"}, .fds = {}});
    if (!child.ok()) return child.status();
    SocketPair control = CreateSeqpacketPair().value();
    KeeperLoader loader;
    loader.pid = child->pid();
    loader.pidfd.reset(static_cast<int>(syscall(SYS_pidfd_open, child->pid(), 0)));
    loader.control_socket = std::move(control.first);
    end_ = loader.end;
    child_.emplace(*std::move(child));
    return loader;
  }

  static std::string ReadRequest(int fd) {
    internal::v1::LoadRequest request;
    std::string bytes(1000, '\0');
    bytes.resize(static_cast<size_t>(pread(fd, bytes.data(), bytes.size(), 0)));
    EXPECT_TRUE(request.ParseFromString(bytes));
    return request.fingerprint();
  }

  absl::StatusOr<SpawnedLoader> SpawnOne() {
    KeeperLoaderSpawner spawner([this](const std::vector<std::string>&, int fd) { return StartSleeper(fd); });
    internal::v1::LoadRequest request;
    request.set_fingerprint("abc");
    return spawner.Spawn(request);
  }

  std::optional<ChildProcess> child_;
  std::shared_ptr<LoaderEnd> end_;
  std::string request_;
};

TEST_F(KeeperLoaderSpawnerTest, HandsTheRequestOver) {
  const auto loader = SpawnOne();
  ASSERT_THAT(loader, IsOk());
  EXPECT_EQ(request_, "abc");
}

TEST_F(KeeperLoaderSpawnerTest, SaysHowTheLoaderDied) {
  const auto loader = SpawnOne();
  std::thread keeper([this] { end_->Set(SIGSEGV); });
  EXPECT_EQ(loader->process->WaitForEnd(kPatience), "killed by SIGSEGV");
  EXPECT_EQ(loader->process->WaitForEnd(milliseconds(0)), "killed by SIGSEGV");
  keeper.join();
}

// Each of a load's waits for it would take all of its time, and the broker would not end meanwhile.
TEST_F(KeeperLoaderSpawnerTest, SeesThatALoaderHasEndedThoughTheKeeperIsNotThereToSaySo) {
  const auto loader = SpawnOne();
  end_->Lose();
  EXPECT_EQ(loader->process->WaitForEnd(milliseconds(10)), "") << "it runs";
  loader->process->Kill("the test ends it");
  EXPECT_EQ(loader->process->WaitForEnd(std::chrono::hours(1)), "");
  EXPECT_EQ(loader->process->WaitForEnd(std::chrono::hours(1)), "");
}

TEST_F(KeeperLoaderSpawnerTest, DoesNotKnowTheEndOfOneThatRuns) {
  const auto loader = SpawnOne();
  EXPECT_EQ(loader->process->WaitForEnd(milliseconds(10)), "");
}

TEST_F(KeeperLoaderSpawnerTest, KillsALoaderThatIsNotWantedAnyMore) {
  {
    const auto loader = SpawnOne();
    ASSERT_THAT(loader, IsOk());
  }
  const auto exit = child_->Wait(kPatience);
  ASSERT_THAT(exit, IsOk());
  EXPECT_EQ(exit->signal, SIGKILL);
}

TEST_F(KeeperLoaderSpawnerTest, SaysWhyTheKeeperStartsNone) {
  KeeperLoaderSpawner spawner([](const std::vector<std::string>&, int) -> absl::StatusOr<KeeperLoader> {
    return MakeError(Reason::kKeeperRefused, "64 loaders are running");
  });
  EXPECT_THAT(spawner.Spawn({}), StatusIs(Reason::kKeeperRefused, HasSubstr("64 loaders")));
}

}  // namespace
}  // namespace weightbroker
