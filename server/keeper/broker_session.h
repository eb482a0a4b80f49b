// One broker's side of the conversation: answers what it asks, as protocol.h says.
//
//   BrokerSession session(number, Connection(std::move(control_socket)), context);
//   if (absl::Status status = session.OnReadable(); !status.ok()) ...      // the broker has gone or misbehaves: end it
//
// Never blocks. Not thread-safe.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "server/keeper/connection.h"
#include "server/keeper/entry_store.h"
#include "server/keeper/fd_store.h"
#include "server/keeper/loaders.h"
#include "server/keeper/supervisor.h"

namespace weightbroker {

// What a session works on. All of it outlives the session.
struct SessionContext {
  int listening_fd = -1;
  EntryStore* entries = nullptr;
  FdStore* fd_store = nullptr;
  Loaders* loaders = nullptr;
  Supervisor* supervisor = nullptr;
};

class BrokerSession {
 public:
  using TimePoint = Connection::TimePoint;

  // `number` tells this broker from those before it.
  BrokerSession(int64_t number, Connection connection, const SessionContext& context)
      : number_(number), connection_(std::move(connection)), context_(context) {}
  // After execve: hello was said before.
  void ResumeWelcomed(uint16_t version);

  int64_t number() const { return number_; }
  Connection& connection() { return connection_; }
  const Connection& connection() const { return connection_; }
  bool welcomed() const { return welcomed_; }
  // Whether nothing is half done, so that the session can be written down.
  bool quiescent() const { return connection_.idle() && !context_.entries->has_partial(); }

  // Handles what has arrived, until an answer has to wait. SERVICE_UNAVAILABLE if the broker has gone; KEEPER_REFUSED
  // if it cannot be welcomed, and knows it; anything else if it misbehaves.
  absl::Status OnReadable(TimePoint now);

  // The broker's process has ended: what it had sent before counts, but it gets no loaders any more.
  void HandleTheRest(TimePoint now);

  // Handles a packet that somebody else has received: the hello of one that came over the private socket.
  absl::Status Handle(ReceivedPacket packet, TimePoint now);

  void SendPing(int64_t number);
  void SendExited(pid_t pid, int wait_status);

 private:
  absl::Status Welcome(const KeeperMessage& hello);
  absl::Status Put(ReceivedPacket packet);
  void Drop(const KeeperMessage& message);
  void SpawnLoader(const ReceivedPacket& packet);
  void DetachLoader(const KeeperMessage& message);
  void Ack(int64_t request_id);
  void Nack(int64_t request_id, const std::string& message);

  const int64_t number_;
  Connection connection_;
  const SessionContext context_;
  bool welcomed_ = false;
  bool ended_ = false;
};

// The nack for a hello that cannot be answered otherwise; empty if it can.
std::string WhyNotWelcome(const KeeperMessage& hello);

}  // namespace weightbroker
