#include "server/endpoint/peer.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/unique_fd.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;

struct Pair {
  UniqueFd here;
  UniqueFd there;

  Pair() {
    int fds[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    here.reset(fds[0]);
    there.reset(fds[1]);
  }
  std::string name() const { return "fd:" + std::to_string(here.get()); }
};

TEST(ReadPeer, GivesTheCredentialsOfTheOtherSide) {
  const Pair pair;
  const auto peer = ReadPeer(pair.here.get());

  ASSERT_THAT(peer, IsOk());
  EXPECT_EQ(peer->uid, geteuid());
  EXPECT_EQ(peer->gid, getegid());
  EXPECT_EQ(peer->pid, getpid());
}

TEST(ReadPeer, RefusesWhatIsNoSocket) {
  const UniqueFd file(open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_THAT(ReadPeer(file.get()), StatusIs(Reason::kSystemError));
  EXPECT_THAT(ReadPeerGroups(file.get()), StatusIs(Reason::kSystemError));
}

TEST(PeerTable, FindsThePeerOfAConnection) {
  const Pair pair;
  PeerTable table;
  table.Add(pair.here.get(), {.uid = 7, .gid = 8, .pid = 9});

  const auto peer = table.Find(pair.name());

  ASSERT_TRUE(peer.has_value());
  EXPECT_EQ(peer->uid, 7u);
  EXPECT_EQ(peer->pid, 9);
}

TEST(PeerTable, FindsNothingForConnectionsThatAreNotOurs) {
  PeerTable table;
  for (const char* name : {"", "fd:", "fd:x", "fd:12345", "ipv4:127.0.0.1:80", "unix:"}) {
    EXPECT_FALSE(table.Find(name).has_value()) << name;
  }
}

TEST(PeerTable, CountsAConnectionUntilItIsClosed) {
  PeerTable table;
  const Pair stays;
  Pair goes;
  table.Add(stays.here.get(), {});
  table.Add(goes.here.get(), {});
  EXPECT_EQ(table.CountOpen(), 2);

  goes.here.reset();

  EXPECT_EQ(table.CountOpen(), 1);
}

TEST(PeerTable, DoesNotTakeAnotherSocketOfTheSameNumberForAnOpenConnection) {
  PeerTable table;
  const Pair other;
  Pair closed;
  table.Add(closed.here.get(), {});
  ASSERT_EQ(dup2(other.here.get(), closed.here.get()), closed.here.get());

  EXPECT_EQ(table.CountOpen(), 0);
}

}  // namespace
}  // namespace weightbroker
