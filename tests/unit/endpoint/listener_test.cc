#include "server/endpoint/listener.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <optional>
#include <thread>

#include "common/base/socket.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/endpoint/socket_client.h"
#include "tests/unit/endpoint/temp_folder.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::weightbroker::testing::Connect;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsClosedWithin;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::kNobody;
using ::weightbroker::testing::RunAsUser;
using ::weightbroker::testing::Send;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::TempFolder;

struct stat StatOf(const std::string& path) {
  struct stat result {};
  EXPECT_EQ(lstat(path.c_str(), &result), 0) << path;
  return result;
}

bool Exists(const std::string& path) {
  struct stat ignored {};
  return lstat(path.c_str(), &ignored) == 0;
}

// A listening socket made by other means than Listener, without a lock.
UniqueFd BindPlainly(const std::string& path, int type = SOCK_STREAM) {
  UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  EXPECT_EQ(bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  if (type != SOCK_DGRAM) {
    EXPECT_EQ(listen(fd.get(), 1), 0);
  }
  return fd;
}

TEST(Listener, ListensWithTheModeAskedFor) {
  TempFolder folder;
  auto listener = Listener::Create({.path = folder / "s", .mode = 0600});
  ASSERT_THAT(listener, IsOk());

  EXPECT_EQ(StatOf(folder / "s").st_mode & 07777, 0600u);
  EXPECT_TRUE(Connect(folder / "s").valid());
  UniqueFd accepted(accept(listener->fd(), nullptr, nullptr));
  EXPECT_TRUE(accepted.valid());
  EXPECT_EQ(fcntl(listener->fd(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST(Listener, GivesTheSocketToTheGroupAskedFor) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give a file to any group";
  TempFolder folder;
  auto listener = Listener::Create({.path = folder / "s", .group = 12345});
  ASSERT_THAT(listener, IsOk());

  EXPECT_EQ(StatOf(folder / "s").st_gid, 12345u);
  EXPECT_EQ(StatOf(folder / "s").st_mode & 07777, 0660u);
}

// A process that has ended, and whose lock is still there: the kernel closes what it had open after all else.
TEST(Listener, WaitsForTheLockOfOneThatIsDyingAndNotOfOneThatLives) {
  TempFolder folder;
  const pid_t dead = fork();
  if (dead == 0) _exit(0);
  ASSERT_EQ(waitpid(dead, nullptr, 0), dead);
  const std::string lock_path = std::string(folder / "s") + ".lock";
  UniqueFd lock(open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(flock(lock.get(), LOCK_EX), 0);
  const auto write_holder = [&](pid_t pid) {
    const std::string text = std::to_string(pid) + "\n";
    ASSERT_EQ(ftruncate(lock.get(), 0), 0);
    ASSERT_EQ(pwrite(lock.get(), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
  };
  const ListenerOptions patient = {.path = folder / "s", .patience = std::chrono::minutes(10)};

  write_holder(getpid());
  EXPECT_THAT(Listener::Create(patient), StatusIs(Reason::kSocketInUse));

  write_holder(dead);
  std::thread end([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    lock.reset();
  });
  EXPECT_THAT(Listener::Create(patient), IsOk());
  end.join();
}

TEST(Listener, GoesOnAfterItWasTakenApartWithTheSameSocketAndLock) {
  TempFolder folder;
  auto first = Listener::Create({.path = folder / "s"});
  ASSERT_THAT(first, IsOk());
  const ino_t inode = StatOf(folder / "s").st_ino;
  ListenerParts parts = std::move(*first).Release();
  { Listener ended = *std::move(first); }
  EXPECT_TRUE(Connect(folder / "s").valid());
  EXPECT_THAT(Listener::Create({.path = folder / "s"}), StatusIs(Reason::kSocketInUse));

  std::optional<Listener> second = Listener::Adopt(std::move(parts));

  EXPECT_EQ(StatOf(folder / "s").st_ino, inode);
  EXPECT_TRUE(UniqueFd(accept(second->fd(), nullptr, nullptr)).valid());
  second.reset();
  EXPECT_FALSE(Exists(folder / "s"));
  EXPECT_THAT(Listener::Create({.path = folder / "s"}), IsOk());
}

TEST(Listener, ReplacesAStalePacketSocketAndListensForPackets) {
  TempFolder folder;
  BindPlainly(folder / "s", SOCK_SEQPACKET).reset();
  auto listener = Listener::Create({.path = folder / "s", .type = SOCK_SEQPACKET});
  ASSERT_THAT(listener, IsOk());
  EXPECT_FALSE(Connect(folder / "s").valid());  // a stream is not what it takes
}

TEST(Listener, IsNotReachableBeforeItsPermissionsAreSet) {
  // A group that cannot be set leaves no socket behind that somebody could have connected to.
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become a user who is in no other group";
  TempFolder folder;
  ASSERT_EQ(chown(folder.path().c_str(), kNobody, kNobody), 0);
  const std::string path = folder / "s";

  EXPECT_EQ(RunAsUser(kNobody,
                      [&] {
                        const auto refused = Listener::Create({.path = path, .group = 0});
                        EXPECT_THAT(refused, StatusIs(Reason::kSocketUnusable, HasSubstr("to group 0")));
                        return ::testing::Test::HasFailure() ? 1 : 0;
                      }),
            0);
  EXPECT_FALSE(Exists(path));
}

TEST(Listener, RemovesItsSocketAndLeavesTheLockFile) {
  TempFolder folder;
  { ASSERT_THAT(Listener::Create({.path = folder / "s"}), IsOk()); }

  EXPECT_FALSE(Exists(folder / "s"));
  EXPECT_TRUE(Exists(folder / "s.lock"));
  EXPECT_THAT(Listener::Create({.path = folder / "s"}), IsOk());
}

TEST(Listener, NeverRemovesASocketThatAnotherPutInItsPlace) {
  TempFolder folder;
  UniqueFd other;
  {
    auto listener = Listener::Create({.path = folder / "s"});
    ASSERT_THAT(listener, IsOk());
    ASSERT_EQ(unlink((folder / "s").c_str()), 0);
    other = BindPlainly(folder / "s");
  }
  EXPECT_TRUE(Connect(folder / "s").valid());
}

TEST(Listener, RefusesASecondOnTheSamePathAndLeavesTheFirstUndisturbed) {
  TempFolder folder;
  auto first = Listener::Create({.path = folder / "s"});
  ASSERT_THAT(first, IsOk());
  UniqueFd client = Connect(folder / "s");
  UniqueFd accepted(accept(first->fd(), nullptr, nullptr));
  const ino_t inode = StatOf(folder / "s").st_ino;

  const auto second = Listener::Create({.path = folder / "s", .mode = 0777});

  EXPECT_THAT(second, StatusIs(Reason::kSocketInUse, AllOf(HasSubstr(folder / "s"), HasSubstr("--socket"))));
  EXPECT_THAT(second, HasMetadata("pid", std::to_string(getpid())));
  EXPECT_EQ(StatOf(folder / "s").st_ino, inode);
  EXPECT_EQ(StatOf(folder / "s").st_mode & 07777, 0660u);
  Send(client, "x");
  char byte = 0;
  EXPECT_EQ(recv(accepted.get(), &byte, 1, 0), 1);
  EXPECT_TRUE(Connect(folder / "s").valid());
}

TEST(Listener, RefusesALiveServiceThatHoldsNoLock) {
  TempFolder folder;
  const UniqueFd live = BindPlainly(folder / "s");

  const auto second = Listener::Create({.path = folder / "s"});

  EXPECT_THAT(second, StatusIs(Reason::kSocketInUse));
  EXPECT_THAT(second, HasMetadata("pid", std::to_string(getpid())));
  EXPECT_TRUE(Connect(folder / "s").valid());
}

TEST(Listener, WaitsForWhatIsLeftOfAServiceThatIsEnding) {
  TempFolder folder;
  UniqueFd left = BindPlainly(folder / "s");
  std::thread ending([&] {
    const UniqueFd probed(accept(left.get(), nullptr, nullptr));
    left.reset();
  });
  const auto successor = Listener::Create({.path = folder / "s", .patience = std::chrono::minutes(10)});
  ending.join();
  EXPECT_THAT(successor, IsOk());
  EXPECT_TRUE(Connect(folder / "s").valid());
}

TEST(Listener, SaysOfWhatIsLeftThatTheProcessWhichBeganItHasEnded) {
  TempFolder folder;
  const std::string path = folder / "s";
  SocketPair passing = CreateSeqpacketPair().value();
  ASSERT_EQ(RunAsUser(geteuid(),
                      [&] {
                        const UniqueFd live = BindPlainly(path);
                        return SendMessage(passing.second.get(), "it", std::vector{live.get()}).ok() ? 0 : 1;
                      }),
            0);
  const auto left = ReceiveMessage(passing.first.get());
  ASSERT_THAT(left, IsOk());
  EXPECT_THAT(Listener::Create({.path = path}), StatusIs(Reason::kSocketInUse, HasSubstr("which has ended")));
}

TEST(Listener, RefusesALiveServiceWhoseBacklogIsFull) {
  TempFolder folder;
  const UniqueFd live = BindPlainly(folder / "s");
  const UniqueFd waiting_1 = Connect(folder / "s");
  const UniqueFd waiting_2 = Connect(folder / "s");

  EXPECT_THAT(Listener::Create({.path = folder / "s"}), StatusIs(Reason::kSocketInUse));
}

TEST(Listener, RefusesALiveSocketOfAnotherType) {
  TempFolder folder;
  const UniqueFd live = BindPlainly(folder / "s", SOCK_DGRAM);

  EXPECT_THAT(Listener::Create({.path = folder / "s"}), StatusIs(Reason::kSocketInUse));
  EXPECT_TRUE(Exists(folder / "s"));
}

TEST(Listener, ReplacesAStaleSocketAlsoOfAProcessThatWasKilled) {
  TempFolder folder;
  const std::string path = folder / "s";
  EXPECT_EQ(RunAsUser(geteuid(),
                      [&] {
                        auto listener = Listener::Create({.path = path});
                        if (listener.ok()) raise(SIGKILL);
                        return 1;
                      }),
            -1);
  ASSERT_TRUE(Exists(path));
  ASSERT_FALSE(Connect(path).valid());

  const auto listener = Listener::Create({.path = path});

  EXPECT_THAT(listener, IsOk());
  EXPECT_TRUE(Connect(path).valid());
}

TEST(Listener, KeepsItsLockWhenItIsMoved) {
  TempFolder folder;
  auto made = Listener::Create({.path = folder / "s"});
  ASSERT_THAT(made, IsOk());
  std::optional<Listener> listener(*std::move(made));

  EXPECT_THAT(Listener::Create({.path = folder / "s"}), StatusIs(Reason::kSocketInUse));
  EXPECT_EQ(listener->path(), folder / "s");
  listener.reset();
  EXPECT_THAT(Listener::Create({.path = folder / "s"}), IsOk());
}

TEST(Listener, AcceptsAPathOf107BytesAndRefusesOneOf108) {
  TempFolder folder;
  const std::string longest = folder / std::string(kMaxSocketPathBytes - folder.path().size() - 1, 's');
  ASSERT_EQ(longest.size(), 107u);

  EXPECT_THAT(Listener::Create({.path = longest}), IsOk());
  EXPECT_THAT(Listener::Create({.path = longest + "s"}),
              StatusIs(Reason::kSocketPathInvalid, AllOf(HasSubstr("108 bytes"), HasSubstr("may have 107"))));
}

TEST(Listener, RefusesPathsThatAreNotInTheFileSystem) {
  EXPECT_THAT(Listener::Create({.path = ""}), StatusIs(Reason::kSocketPathInvalid, HasSubstr("is empty")));
  EXPECT_THAT(Listener::Create({.path = "@abstract"}), StatusIs(Reason::kSocketPathInvalid, HasSubstr("is abstract")));
  EXPECT_THAT(Listener::Create({.path = std::string("\0abstract", 9)}),
              StatusIs(Reason::kSocketPathInvalid, HasSubstr("is abstract")));
  EXPECT_THAT(Listener::Create({.path = "relative.sock"}),
              StatusIs(Reason::kSocketPathInvalid, HasSubstr("is relative")));
  EXPECT_THAT(Listener::Create({.path = "/tmp/"}), StatusIs(Reason::kSocketPathInvalid, HasSubstr("names a folder")));
}

TEST(Listener, RefusesAMissingFolderUnlessItIsToBeCreated) {
  TempFolder folder;
  const std::string path = folder / "new/s";

  EXPECT_THAT(Listener::Create({.path = path}),
              StatusIs(Reason::kSocketUnusable, HasSubstr(folder / "new does not exist")));
  const mode_t umask_before = umask(0077);
  EXPECT_THAT(Listener::Create({.path = path, .create_folder = true}), IsOk());
  umask(umask_before);
  EXPECT_EQ(StatOf(folder / "new").st_mode & 07777, 0755u);
}

TEST(Listener, RefusesAFolderThatIsAFile) {
  EXPECT_THAT(Listener::Create({.path = "/etc/hostname/s"}), StatusIs(Reason::kSocketUnusable));
}

TEST(Listener, RefusesWhatIsThereAndIsNotASocket) {
  TempFolder folder;
  std::ofstream(folder / "s") << "precious";
  ASSERT_EQ(symlink("/nonexistent", (folder / "link").c_str()), 0);

  EXPECT_THAT(Listener::Create({.path = folder / "s"}), StatusIs(Reason::kSocketUnusable, HasSubstr("not a socket")));
  EXPECT_THAT(Listener::Create({.path = folder / "link"}),
              StatusIs(Reason::kSocketUnusable, HasSubstr("not a socket")));
  EXPECT_EQ(StatOf(folder / "s").st_size, 8);
  EXPECT_TRUE(Exists(folder / "link"));
}

TEST(Listener, DoesNotFollowALockFileThatIsASymbolicLink) {
  TempFolder folder;
  std::ofstream(folder / "precious") << "precious";
  ASSERT_EQ(symlink((folder / "precious").c_str(), (folder / "s.lock").c_str()), 0);

  EXPECT_THAT(Listener::Create({.path = folder / "s"}), StatusIs(Reason::kSocketUnusable, HasSubstr("lock file")));
  EXPECT_EQ(StatOf(folder / "precious").st_size, 8);
}

TEST(Listener, RefusesAFolderThatItCannotWrite) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  TempFolder folder;
  ASSERT_EQ(chmod(folder.path().c_str(), 0755), 0);  // root's, so trusted, but not writable for nobody
  const std::string path = folder / "s";

  EXPECT_EQ(RunAsUser(kNobody,
                      [&] {
                        const auto refused = Listener::Create({.path = path});
                        EXPECT_THAT(refused, StatusIs(Reason::kSocketUnusable, HasSubstr("Permission denied")));
                        EXPECT_THAT(refused, HasMetadata("errno", "EACCES"));
                        return ::testing::Test::HasFailure() ? 1 : 0;
                      }),
            0);
}

TEST(Listener, RefusesAFolderOfAnotherUser) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to give a folder away";
  TempFolder folder;
  ASSERT_EQ(chown(folder.path().c_str(), kNobody, kNobody), 0);

  EXPECT_THAT(Listener::Create({.path = folder / "s"}),
              StatusIs(Reason::kSocketUnusable, HasSubstr("belongs to user 65534, who could replace the socket")));
}

TEST(Listener, RefusesASocketOfAnotherUserEvenAStaleOne) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to give a socket away";
  TempFolder folder;
  { const UniqueFd stale = BindPlainly(folder / "s"); }
  ASSERT_EQ(lchown((folder / "s").c_str(), kNobody, kNobody), 0);

  EXPECT_THAT(Listener::Create({.path = folder / "s"}),
              StatusIs(Reason::kSocketUnusable, HasSubstr("belongs to user 65534, not to user 0")));
  EXPECT_TRUE(Exists(folder / "s"));
}

class DefaultSocketTest : public ::testing::Test {
 protected:
  DefaultSocketTest() {
    unsetenv("WEIGHTBROKER_SOCKET");
    unsetenv("XDG_RUNTIME_DIR");
  }
};

TEST_F(DefaultSocketTest, IsWhatTheEnvironmentSays) {
  setenv("WEIGHTBROKER_SOCKET", "/x/y.sock", 1);
  auto found = FindDefaultSocket();
  unsetenv("WEIGHTBROKER_SOCKET");

  ASSERT_THAT(found, IsOk());
  EXPECT_EQ(found->path, "/x/y.sock");
  EXPECT_FALSE(found->create_folder);
}

TEST_F(DefaultSocketTest, IsUnderRunForRoot) {
  if (geteuid() != 0) GTEST_SKIP() << "is about root";
  auto found = FindDefaultSocket();

  ASSERT_THAT(found, IsOk());
  EXPECT_EQ(found->path, "/run/weightbroker/weightbroker.sock");
  EXPECT_TRUE(found->create_folder);
}

TEST_F(DefaultSocketTest, IsInTheRuntimeFolderForOthersAndRefusedWithoutOne) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  EXPECT_EQ(RunAsUser(kNobody,
                      [] {
                        EXPECT_THAT(DefaultSocketPath(), StatusIs(Reason::kSocketPathInvalid, HasSubstr("--socket")));
                        setenv("XDG_RUNTIME_DIR", "/run/user/65534", 1);
                        EXPECT_EQ(*DefaultSocketPath(), "/run/user/65534/weightbroker/weightbroker.sock");
                        return ::testing::Test::HasFailure() ? 1 : 0;
                      }),
            0);
}

}  // namespace
}  // namespace weightbroker
