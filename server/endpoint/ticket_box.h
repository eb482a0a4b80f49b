// Tickets: one-time capabilities that are exchanged for file descriptors over a second connection to the same socket,
// because gRPC cannot carry a descriptor.
//
//   const Ticket ticket = box.Issue({.uid = peer.uid, .lease_id = 7, .fds = shard_fds}, kTicketLifetime);
//   auto grant = box.Redeem(bytes_from_the_wire, peer.uid);  // TICKET_INVALID: unknown, used, expired, or another
//   uid's
//
// A ticket is 32 random bytes. It is used up by the first attempt of the right uid; an attempt by another uid is
// refused and leaves it. It ends with its lease (Revoke) or its time. Never logged. Thread-safe.
#pragma once

#include <sys/types.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/mutex.h"
#include "common/base/unique_fd.h"

namespace weightbroker {

inline constexpr size_t kTicketBytes = 32;
using Ticket = std::array<char, kTicketBytes>;

// The descriptors of one shard, in slab order, shared by everyone who may send them.
using SharedFds = std::shared_ptr<const std::vector<UniqueFd>>;

struct TicketGrant {
  uid_t uid = 0;
  int64_t lease_id = 0;
  SharedFds fds;
};

class TicketBox {
 public:
  using Clock = std::function<std::chrono::steady_clock::time_point()>;
  explicit TicketBox(Clock clock = [] { return std::chrono::steady_clock::now(); });

  // Makes a ticket for `grant.uid` that can be redeemed once, within `lifetime`.
  Ticket Issue(TicketGrant grant, std::chrono::milliseconds lifetime);
  // Uses the ticket up and gives what it stands for; TICKET_INVALID, saying which of the reasons it is.
  absl::StatusOr<TicketGrant> Redeem(std::string_view ticket, uid_t uid);
  // Ends the ticket of a lease, if it has one left.
  void Revoke(int64_t lease_id);
  // How many tickets could still be redeemed.
  size_t size() const;

 private:
  struct Entry {
    TicketGrant grant;
    std::chrono::steady_clock::time_point expires;
  };

  const Clock clock_;
  mutable Mutex mutex_;
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weightbroker
