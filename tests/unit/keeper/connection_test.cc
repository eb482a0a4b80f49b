#include "server/keeper/connection.h"

#include <gtest/gtest.h>
#include <poll.h>

#include "common/base/socket.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/keeper/fds.h"

namespace weightbroker {
namespace {

using testing::ContentsOf;
using testing::CountOpenFds;
using testing::IsOk;
using testing::MakeMemfd;
using testing::StatusIs;
using Type = KeeperMessageType;

constexpr Connection::TimePoint kNow{};

class ConnectionTest : public ::testing::Test {
 protected:
  ConnectionTest() {
    SocketPair pair = *CreateSeqpacketPair();
    connection_.emplace(std::move(pair.first));
    broker_ = std::move(pair.second);
  }

  absl::StatusOr<ReceivedPacket> ReceiveAtBroker() {
    auto received = ReceiveMessage(broker_.get(), std::chrono::milliseconds(0));
    if (!received.ok()) return received.status();
    auto message = DecodeKeeperMessage(received->bytes);
    if (!message.ok()) return message.status();
    return ReceivedPacket{*std::move(message), std::move(received->fds)};
  }

  std::optional<Connection> connection_;
  UniqueFd broker_;
};

TEST_F(ConnectionTest, SendsAnEntryOfManyDescriptorsAndALongValueInParts) {
  StoredEntry entry = {.key = "a", .value = std::string(kMaxKeeperValueBytes + 5, 'v'), .fds = {}};
  for (int i = 0; i < 300; ++i) entry.fds.push_back(MakeMemfd(std::to_string(i)));
  connection_->set_version(1);
  connection_->SendEntry(std::make_shared<const StoredEntry>(std::move(entry)));
  ASSERT_THAT(connection_->Flush(kNow), IsOk());
  EXPECT_TRUE(connection_->idle());
  const auto first = ReceiveAtBroker();
  const auto second = ReceiveAtBroker();
  ASSERT_THAT(first, IsOk());
  ASSERT_THAT(second, IsOk());
  EXPECT_EQ(first->message.type, Type::kEntry);
  EXPECT_EQ(first->message.parts, 2);
  EXPECT_EQ(first->message.value.size() + second->message.value.size(), kMaxKeeperValueBytes + 5);
  EXPECT_EQ(first->fds.size(), 250);
  ASSERT_EQ(second->fds.size(), 50);
  EXPECT_EQ(ContentsOf(second->fds[49].get()), "299");
}

TEST_F(ConnectionTest, WaitsForABrokerThatDoesNotReadAndLosesNothing) {
  const std::string value(kMaxKeeperValueBytes, 'v');
  for (int64_t i = 0; i < 50; ++i) connection_->Send({.type = Type::kNack, .request_id = i, .value = value});
  ASSERT_THAT(connection_->Flush(kNow), IsOk());
  EXPECT_FALSE(connection_->idle());
  EXPECT_EQ(connection_->events(), POLLOUT);
  for (int64_t i = 0; i < 50; ++i) {
    const auto packet = ReceiveAtBroker();
    ASSERT_THAT(packet, IsOk());
    EXPECT_EQ(packet->message.request_id, i);
    ASSERT_THAT(connection_->Flush(kNow), IsOk());
  }
  EXPECT_TRUE(connection_->idle());
  EXPECT_EQ(connection_->events(), POLLIN);
}

TEST_F(ConnectionTest, ClosesDescriptorsThatItWasGivenOnceTheyAreSent) {
  const int before = CountOpenFds();
  std::vector<UniqueFd> fds;
  fds.push_back(MakeMemfd("pidfd"));
  connection_->Send({.type = Type::kSpawned}, std::move(fds));
  ASSERT_THAT(connection_->Flush(kNow), IsOk());
  EXPECT_EQ(CountOpenFds(), before);
}

TEST_F(ConnectionTest, TellsNothingFromTheEnd) {
  auto nothing = connection_->Receive();
  ASSERT_THAT(nothing, IsOk());
  EXPECT_FALSE(nothing->has_value());
  broker_.reset();
  EXPECT_THAT(connection_->Receive(), StatusIs(Reason::kServiceUnavailable));
  connection_->Send({.type = Type::kPing});
  EXPECT_THAT(connection_->Flush(kNow), StatusIs(Reason::kServiceUnavailable));
}

TEST_F(ConnectionTest, RefusesGarbageAndClosesWhatCameWithIt) {
  const UniqueFd memfd = MakeMemfd("");
  const int before = CountOpenFds();
  const int fds[] = {memfd.get()};
  ASSERT_THAT(SendMessage(broker_.get(), "garbage", fds), IsOk());
  EXPECT_THAT(connection_->Receive(), StatusIs(Reason::kProtocolError));
  EXPECT_EQ(CountOpenFds(), before);
}

}  // namespace
}  // namespace weightbroker
