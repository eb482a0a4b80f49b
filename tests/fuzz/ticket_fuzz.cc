// The input is read three times: as the first bytes of a connection to the service; as what the service answers to a
// ticket, after a byte that says how many descriptors come with it; and as the message of a refusal.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <vector>

#include "client/include/weightbroker/redeem.h"
#include "common/base/quote.h"
#include "common/base/socket.h"
#include "common/base/unique_fd.h"
#include "server/endpoint/handshake.h"
#include "server/endpoint/http2_refusal.h"
#include "server/endpoint/reply.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/target.h"

namespace weightbroker {
namespace {

using Kind = Handshake::Kind;

void CheckHandshake(const Handshake& handshake, size_t size) {
  FUZZ_CHECK((handshake.kind == Kind::kMalformed) == !handshake.error.ok());
  FUZZ_CHECK((handshake.kind == Kind::kTicket) == !handshake.ticket.empty());
  FUZZ_CHECK(handshake.ticket.size() <= ticket_protocol::kMaxTicketBytes);
  FUZZ_CHECK(handshake.kind != Kind::kIncomplete || size < kMaxHandshakeBytes);
}

// However the bytes arrive, it is the same that is said in the end, and what has been said stays.
void ReadInPieces(std::string_view input) {
  const std::string_view seen = input.substr(0, kMaxHandshakeBytes);
  const Handshake whole = ReadHandshake(seen);
  CheckHandshake(whole, seen.size());
  if (!whole.error.ok()) CheckRefusal(whole.error);
  // Every length of what decides most, then some.
  for (size_t size = 0; size < seen.size(); size += size < 40 ? 1 : 31) {
    const Handshake part = ReadHandshake(seen.substr(0, size));
    CheckHandshake(part, size);
    FUZZ_CHECK(part.kind == Kind::kIncomplete || part.kind == whole.kind);
    FUZZ_CHECK(part.kind != Kind::kTicket || part.ticket == whole.ticket);
  }
}

void RefuseHttp2(std::string_view input) {
  Http2Refusal whole;
  whole.Read(input);
  Http2Refusal in_pieces;
  for (size_t at = 0; at < input.size(); at += 7) in_pieces.Read(input.substr(at, 7));
  FUZZ_CHECK(whole.stream() == in_pieces.stream());
  FUZZ_CHECK(!whole.stream().has_value() || *whole.stream() <= 0x7FFFFFFF);
}

struct Sockets {
  UniqueFd ours;
  UniqueFd theirs;
};

Sockets MakeSockets() {
  int fds[2];
  FUZZ_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

// The lowest number that is free; another one afterwards means that something was left open.
int NextFd() { return UniqueFd(fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0)).get(); }

struct Answer {
  int code = 0;
  std::vector<UniqueFd> fds;
  std::string error;
};

Answer ReadAnswer(int socket, size_t capacity) {
  char error[kRedeemErrorBytes] = {};
  const redeem_internal::Call call = {"fuzz.sock", -1, error, sizeof(error)};
  std::vector<int> fds(capacity, -1);
  size_t count = 0;
  Answer answer;
  answer.code = redeem_internal::ReceiveDescriptors(call, socket, fds.data(), fds.size(), &count);
  FUZZ_CHECK(count <= capacity);
  FUZZ_CHECK(answer.code == 0 || count == 0);
  FUZZ_CHECK((answer.code == 0) == (error[0] == '\0'));
  for (size_t i = 0; i < count; ++i) FUZZ_CHECK(fcntl(fds[i], F_GETFD) == FD_CLOEXEC);
  for (size_t i = 0; i < count; ++i) answer.fds.emplace_back(fds[i]);
  answer.error = error;
  return answer;
}

void RedeemFromAnything(std::string_view input) {
  const auto sent_fds = TakeInteger<uint8_t>(input) % 8;
  const int next_fd = NextFd();
  {
    Sockets sockets = MakeSockets();
    if (!input.empty()) {
      FUZZ_CHECK(send(sockets.theirs.get(), input.data(), input.size(), MSG_NOSIGNAL) >= 0);
    }
    const std::vector<int> fds(static_cast<size_t>(sent_fds), STDERR_FILENO);
    const char byte = ticket_protocol::kBatchByte;
    if (!fds.empty()) SendNow(sockets.theirs.get(), {&byte, 1}, fds);
    sockets.theirs.reset();
    const Answer answer = ReadAnswer(sockets.ours.get(), 4);
    FUZZ_CHECK(answer.fds.size() <= fds.size());
  }
  FUZZ_CHECK(NextFd() == next_fd);
}

// What the service says, the client understands.
void RefuseTicket(std::string_view input) {
  const absl::Status error = MakeError(Reason::kTicketInvalid, std::string(input), {});
  Sockets sockets = MakeSockets();
  Reply reply = Reply::TicketRefusal(error);
  FUZZ_CHECK(reply.Advance(sockets.theirs.get()) == Reply::Progress::kSent);
  sockets.theirs.reset();
  const Answer answer = ReadAnswer(sockets.ours.get(), 4);
  FUZZ_CHECK(answer.code == EACCES);
  FUZZ_CHECK(ToUtf8(answer.error) == answer.error);
}

}  // namespace
}  // namespace weightbroker

FUZZ_TARGET(ticket) {
  using namespace weightbroker;
  ReadInPieces(input);
  RefuseHttp2(input);
  RedeemFromAnything(input);
  RefuseTicket(input);
}
