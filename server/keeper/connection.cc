#include "server/keeper/connection.h"

#include <errno.h>
#include <poll.h>

#include <utility>

#include "common/base/error.h"
#include "common/base/socket.h"
#include "common/base/status_macros.h"
#include "common/keeper/parts.h"

namespace weightbroker {
namespace {

// The kernel counts the descriptors in flight per user and gives no sign when there is room again.
constexpr std::chrono::milliseconds kRetryInterval(5);

absl::Status BrokerGone() { return MakeError(Reason::kServiceUnavailable, "the broker has closed the connection"); }

std::vector<int> NumbersOf(std::span<const UniqueFd> fds) {
  std::vector<int> numbers;
  for (const UniqueFd& fd : fds) numbers.push_back(fd.get());
  return numbers;
}

}  // namespace

void Connection::Send(KeeperMessage message, std::vector<UniqueFd> fds, int borrowed_fd) {
  outbox_.push_back({std::move(message), std::move(fds), borrowed_fd, nullptr});
}

void Connection::SendEntry(SharedEntry entry) {
  const int parts = CountParts(entry->value.size(), entry->fds.size());
  for (int part = 0; part < parts; ++part) {
    outbox_.push_back({{.type = KeeperMessageType::kEntry, .part = part, .parts = parts}, {}, -1, entry});
  }
}

absl::Status Connection::Flush(TimePoint now) {
  if (retry_at_.has_value() && now < *retry_at_) return absl::OkStatus();
  retry_at_.reset();
  while (!outbox_.empty()) {
    ASSIGN_OR_RETURN(const SendOutcome outcome, TrySend(outbox_.front()));
    if (outcome == SendOutcome::kTooManyInFlight) retry_at_ = now + kRetryInterval;
    if (outcome != SendOutcome::kSent) return absl::OkStatus();
    outbox_.pop_front();
  }
  return absl::OkStatus();
}

absl::StatusOr<Connection::SendOutcome> Connection::TrySend(const Outgoing& outgoing) {
  KeeperMessage message = outgoing.message;
  message.version = version_;
  std::vector<int> fds = NumbersOf(outgoing.fds);
  if (outgoing.borrowed_fd >= 0) fds.push_back(outgoing.borrowed_fd);
  if (outgoing.entry != nullptr) {
    message.key = outgoing.entry->key;
    message.value = ValueOfPart(outgoing.entry->value, message.part);
    fds = NumbersOf(FdsOfPart(std::span<const UniqueFd>(outgoing.entry->fds), message.part));
  }
  ASSIGN_OR_RETURN(const std::string bytes, EncodeKeeperMessage(message));
  const int error = SendNow(socket_.get(), bytes, fds);
  switch (error) {
    case 0:
      return SendOutcome::kSent;
    case EAGAIN:
      return SendOutcome::kNoRoom;
    case ETOOMANYREFS:
    case ENOBUFS:
    case ENOMEM:
      return SendOutcome::kTooManyInFlight;
    case EPIPE:
    case ECONNRESET:
      return BrokerGone();
    default:
      return SystemError("cannot send to the broker", error);
  }
}

short Connection::events() const {
  if (outbox_.empty()) return POLLIN;
  return retry_at_.has_value() ? 0 : POLLOUT;
}

absl::StatusOr<std::optional<ReceivedPacket>> Connection::Receive() {
  absl::StatusOr<SocketMessage> received = ReceiveMessage(socket_.get(), std::chrono::milliseconds(0));
  if (HasReason(received.status(), Reason::kDeadlineExceeded)) return std::nullopt;
  if (!received.ok()) return received.status();
  if (received->closed) return BrokerGone();
  ASSIGN_OR_RETURN(KeeperMessage message, DecodeKeeperMessage(received->bytes));
  return ReceivedPacket{std::move(message), std::move(received->fds)};
}

}  // namespace weightbroker
