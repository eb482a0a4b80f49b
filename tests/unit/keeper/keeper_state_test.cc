#include "server/keeper/keeper_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/base/wire.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;
using ::testing::UnorderedElementsAre;

KeeperState FullState() {
  KeeperState state;
  state.listener = {.path = "/run/s", .device = 1, .inode = 2, .lock_fd = 10, .fd = 11};
  state.private_socket = SavedSocket{.path = "/run/k", .device = 3, .inode = 4, .lock_fd = 12, .fd = 13};
  state.entries = {{.key = "a", .value = std::string("\0v", 2), .fds = {20, 21}}, {.key = "b", .value = "", .fds = {}}};
  state.broker = SavedBroker{
      .number = 7, .pid = 1'000, .pidfd = 30, .control_fd = 31, .is_child = true, .welcomed = true, .version = 1};
  state.last_broker_number = 7;
  state.loaders = {{.pid = 2'000, .owner = 7}};
  state.supervisor.phase = Supervisor::Phase::kReady;
  state.supervisor.since = Supervisor::TimePoint(milliseconds(5));
  state.supervisor.backoff = milliseconds(40);
  state.supervisor.last_ping = 9;
  state.supervisor.ping_sent = Supervisor::TimePoint(milliseconds(6));
  state.supervisor.ever_ready = true;
  state.notify_socket = "@notify";
  state.watchdog_interval = std::chrono::microseconds(250);
  state.fd_store = "index";
  state.attempts = {.taking_up = "a", .ended = {{"a", 2}, {"b", 1}}, .dropped = 3};
  return state;
}

TEST(KeeperState, IsReadAsItWasWritten) {
  const std::string bytes = SerializeKeeperState(FullState());
  const auto state = ParseKeeperState(bytes);
  ASSERT_THAT(state, IsOk());
  EXPECT_EQ(SerializeKeeperState(*state), bytes);
  EXPECT_EQ(state->listener.path, "/run/s");
  EXPECT_EQ(state->private_socket->fd, 13);
  ASSERT_EQ(state->entries.size(), 2);
  EXPECT_EQ(state->entries[0].fds, (std::vector<int>{20, 21}));
  EXPECT_EQ(state->entries[0].value, std::string("\0v", 2));
  EXPECT_EQ(state->broker->control_fd, 31);
  EXPECT_TRUE(state->broker->welcomed);
  EXPECT_EQ(state->loaders[0].owner, 7);
  EXPECT_EQ(state->supervisor.phase, Supervisor::Phase::kReady);
  EXPECT_EQ(state->supervisor.ping_sent, Supervisor::TimePoint(milliseconds(6)));
  EXPECT_EQ(state->watchdog_interval.count(), 250);
  EXPECT_EQ(state->fd_store, "index");
  EXPECT_EQ(state->attempts.taking_up, "a");
  EXPECT_EQ(state->attempts.ended, (std::map<std::string, int>{{"a", 2}, {"b", 1}}));
  EXPECT_EQ(state->attempts.dropped, 3);
}

TEST(KeeperState, KeepsWhatIsNotThereApartFromZero) {
  KeeperState state = FullState();
  state.broker.reset();
  state.private_socket.reset();
  state.supervisor.ping_sent.reset();
  const auto parsed = ParseKeeperState(SerializeKeeperState(state));
  ASSERT_THAT(parsed, IsOk());
  EXPECT_FALSE(parsed->broker.has_value());
  EXPECT_FALSE(parsed->private_socket.has_value());
  EXPECT_FALSE(parsed->supervisor.ping_sent.has_value());
}

TEST(KeeperState, NamesEveryDescriptorThatMustSurvive) {
  EXPECT_THAT(FullState().Fds(), UnorderedElementsAre(10, 11, 12, 13, 20, 21, 30, 31));
  KeeperState state = FullState();
  state.broker->pidfd = -1;
  state.broker->control_fd = -1;
  EXPECT_THAT(state.Fds(), UnorderedElementsAre(10, 11, 12, 13, 20, 21));
}

TEST(KeeperState, PassesOverFieldsOfAReleaseToCome) {
  WireWriter future;
  future.AddBytes(99, "something new");
  EXPECT_THAT(ParseKeeperState(SerializeKeeperState(FullState()) + future.bytes()), IsOk());
}

TEST(KeeperState, RefusesAHigherVersionAndNoneAtAll) {
  WireWriter writer;
  writer.AddVarint(1, kKeeperStateVersion + 1);
  EXPECT_THAT(ParseKeeperState(writer.bytes()), StatusIs(Reason::kProtocolError, HasSubstr("version 2")));
  EXPECT_THAT(ParseKeeperState(""), StatusIs(Reason::kProtocolError, HasSubstr("version 0")));
}

TEST(KeeperState, RefusesATruncatedState) {
  const std::string bytes = SerializeKeeperState(FullState());
  EXPECT_THAT(ParseKeeperState(bytes.substr(0, bytes.size() - 2)), StatusIs(Reason::kProtocolError));
}

}  // namespace
}  // namespace weightbroker
