// What the endpoint says on a connection that does not go to gRPC, sent piece by piece as the other side takes it.
//
//   Reply reply = Reply::WithFds(grant.fds);
//   switch (reply.Advance(socket)) { ... }                  // again when the socket is writable, until kSent
//
// Never blocks. Not thread-safe.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "server/endpoint/ticket_box.h"

namespace weightbroker {

class Reply {
 public:
  // The descriptors that a ticket stands for, in their order.
  static Reply WithFds(SharedFds fds);
  // A refusal in the ticket protocol, with the error's message.
  static Reply TicketRefusal(const absl::Status& error);
  // These bytes and no descriptors.
  static Reply WithBytes(std::string bytes);

  enum class Progress {
    kSent,         // all of it
    kBlocked,      // call again when the socket is writable
    kFdsInFlight,  // call again a little later: too many descriptors are on their way (ETOOMANYREFS, not for root)
    kBroken,       // the other side has gone
  };
  Progress Advance(int socket);

 private:
  Progress SendBytes(int socket);
  Progress SendBatch(int socket);

  std::string bytes_;
  size_t bytes_sent_ = 0;
  SharedFds fds_;  // may be null
  size_t fds_sent_ = 0;
};

}  // namespace weightbroker
