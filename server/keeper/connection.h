// A connection to a broker, never blocking: what cannot be sent yet waits here.
//
//   connection.Send({.type = KeeperMessageType::kAck, .request_id = id});
//   if (absl::Status sent = connection.Flush(now); !sent.ok()) ...       // SERVICE_UNAVAILABLE: the broker has gone
//   for (auto packet = connection.Receive(); ...)                        // nothing there: no packet and not closed
//
// While anything waits to be sent nothing is read: a broker that does not read cannot make the keeper pile up answers.
// Not thread-safe.
#pragma once

#include <chrono>
#include <deque>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"
#include "common/keeper/protocol.h"
#include "server/keeper/entry_store.h"

namespace weightbroker {

struct ReceivedPacket {
  KeeperMessage message;
  std::vector<UniqueFd> fds;
};

class Connection {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  explicit Connection(UniqueFd socket) : socket_(std::move(socket)) {}

  int fd() const { return socket_.get(); }
  // Every packet from here on says this version.
  void set_version(uint16_t version) { version_ = version; }
  uint16_t version() const { return version_; }

  // Queues a packet. `fds` are closed once it is sent; `borrowed_fd` must live until then.
  void Send(KeeperMessage message, std::vector<UniqueFd> fds = {}, int borrowed_fd = -1);
  // Queues an entry, in as many parts as it takes.
  void SendEntry(SharedEntry entry);

  // Sends what the kernel has room for. SERVICE_UNAVAILABLE if the broker has gone.
  absl::Status Flush(TimePoint now);

  bool idle() const { return outbox_.empty(); }
  // What to poll for.
  short events() const;
  // When to call Flush again though nothing may be polled for.
  std::optional<TimePoint> retry_at() const { return retry_at_; }

  // The next packet; nothing if none is there. SERVICE_UNAVAILABLE at the end of the connection, PROTOCOL_ERROR for
  // what is malformed.
  absl::StatusOr<std::optional<ReceivedPacket>> Receive();

 private:
  struct Outgoing {
    KeeperMessage message;
    std::vector<UniqueFd> fds;
    int borrowed_fd = -1;
    SharedEntry entry;  // if set, the part of it that the message names is encoded when it is sent
  };

  enum class SendOutcome { kSent, kNoRoom, kTooManyInFlight };

  absl::StatusOr<SendOutcome> TrySend(const Outgoing& outgoing);

  UniqueFd socket_;
  uint16_t version_ = kKeeperProtocolVersion;
  std::deque<Outgoing> outbox_;
  std::optional<TimePoint> retry_at_;
};

}  // namespace weightbroker
