#include "server/endpoint/ticket_box.h"

#include <algorithm>
#include <utility>

#include "common/base/error.h"
#include "common/base/random_bytes.h"

namespace weightbroker {
namespace {

Ticket RandomTicket() {
  Ticket ticket;
  const std::string bytes = RandomBytes(ticket.size());
  std::copy(bytes.begin(), bytes.end(), ticket.begin());
  return ticket;
}

absl::Status TicketInvalid(const std::string& why) {
  return MakeError(Reason::kTicketInvalid, "the ticket " + why + ": call Export again for a new one");
}

}  // namespace

TicketBox::TicketBox(Clock clock) : clock_(std::move(clock)) {}

Ticket TicketBox::Issue(TicketGrant grant, std::chrono::milliseconds lifetime) {
  const Ticket ticket = RandomTicket();
  const auto now = clock_();
  MutexLock lock(mutex_);
  std::erase_if(entries_, [now](const auto& entry) { return entry.second.expires <= now; });
  entries_[std::string(ticket.begin(), ticket.end())] = {std::move(grant), now + lifetime};
  return ticket;
}

absl::StatusOr<TicketGrant> TicketBox::Redeem(std::string_view ticket, uid_t uid) {
  const auto now = clock_();
  MutexLock lock(mutex_);
  const auto it = entries_.find(std::string(ticket));
  if (it == entries_.end()) return TicketInvalid("is unknown, was used already, or ended with its Export stream");
  if (it->second.grant.uid != uid) return TicketInvalid("was given to another user");
  Entry entry = std::move(it->second);
  entries_.erase(it);
  if (entry.expires <= now) return TicketInvalid("has expired");
  return std::move(entry.grant);
}

void TicketBox::Revoke(int64_t lease_id) {
  MutexLock lock(mutex_);
  std::erase_if(entries_, [lease_id](const auto& entry) { return entry.second.grant.lease_id == lease_id; });
}

size_t TicketBox::size() const {
  const auto now = clock_();
  MutexLock lock(mutex_);
  return static_cast<size_t>(
      std::count_if(entries_.begin(), entries_.end(), [now](const auto& entry) { return entry.second.expires > now; }));
}

}  // namespace weightbroker
