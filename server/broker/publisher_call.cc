#include "server/broker/publisher_call.h"

#include "server/broker/timestamp.h"

namespace weightbroker {

v1::WritableSlabs DescribeWritable(const ServiceContext& context, const PublicationFacts& facts,
                                   const WritableMemory& memory) {
  v1::WritableSlabs slabs;
  slabs.set_first_slab(memory.first_slab);
  *slabs.mutable_slabs() = {memory.slabs.begin(), memory.slabs.end()};
  if (memory.fds->empty()) return slabs;
  const Ticket ticket =
      context.tickets->Issue({.uid = facts.uid, .lease_id = facts.id, .fds = memory.fds}, context.ticket_lifetime);
  slabs.set_ticket(ticket.data(), ticket.size());
  SetTimestamp(context.clock->WallNow() + context.ticket_lifetime, slabs.mutable_ticket_expire_time());
  return slabs;
}

}  // namespace weightbroker
