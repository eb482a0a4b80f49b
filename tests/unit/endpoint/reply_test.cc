#include "server/endpoint/reply.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include "common/base/unique_fd.h"

namespace weightbroker {
namespace {

struct NonBlockingPair {
  UniqueFd sender;
  UniqueFd receiver;

  NonBlockingPair() {
    int fds[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds), 0);
    sender.reset(fds[0]);
    receiver.reset(fds[1]);
  }

  std::string ReadWhatIsThere() {
    std::string text;
    char buffer[65536];
    for (ssize_t n; (n = recv(receiver.get(), buffer, sizeof(buffer), 0)) > 0;)
      text.append(buffer, static_cast<size_t>(n));
    return text;
  }
};

TEST(Reply, ResumesWhereTheSocketWasFullUntilAllIsSentOnce) {
  NonBlockingPair pair;
  std::string bytes;
  for (int i = 0; i < 300'000; ++i) bytes += static_cast<char>(i % 251);
  Reply reply = Reply::WithBytes(bytes);
  std::string received;
  int blocked = 0;

  Reply::Progress progress = reply.Advance(pair.sender.get());
  while (progress == Reply::Progress::kBlocked) {
    ++blocked;
    received += pair.ReadWhatIsThere();
    progress = reply.Advance(pair.sender.get());
  }
  received += pair.ReadWhatIsThere();

  EXPECT_EQ(progress, Reply::Progress::kSent);
  EXPECT_GT(blocked, 0);
  EXPECT_EQ(received, bytes);
  EXPECT_EQ(reply.Advance(pair.sender.get()), Reply::Progress::kSent);
  EXPECT_EQ(pair.ReadWhatIsThere(), "");
}

TEST(Reply, SendsDescriptorsOnlyAfterTheSocketHasRoomAgain) {
  NonBlockingPair pair;
  const std::string filler(1 << 20, 'x');
  while (send(pair.sender.get(), filler.data(), filler.size(), MSG_DONTWAIT) > 0) {
  }
  auto fds = std::make_shared<std::vector<UniqueFd>>();
  fds->emplace_back(dup(STDERR_FILENO));
  Reply reply = Reply::WithFds(fds);

  EXPECT_EQ(reply.Advance(pair.sender.get()), Reply::Progress::kBlocked);
  pair.ReadWhatIsThere();
  EXPECT_EQ(reply.Advance(pair.sender.get()), Reply::Progress::kSent);
}

TEST(Reply, SaysThatTheOtherSideHasGone) {
  NonBlockingPair pair;
  pair.receiver.reset();
  Reply reply = Reply::WithBytes("text");

  EXPECT_EQ(reply.Advance(pair.sender.get()), Reply::Progress::kBroken);
}

TEST(Reply, CutsAMessageThatIsLongerThanTheProtocolAllows) {
  NonBlockingPair pair;
  Reply reply = Reply::TicketRefusal(absl::PermissionDeniedError(std::string(5000, 'm')));

  EXPECT_EQ(reply.Advance(pair.sender.get()), Reply::Progress::kSent);
  EXPECT_EQ(pair.ReadWhatIsThere().size(), 24u + 1024u);
}

}  // namespace
}  // namespace weightbroker
