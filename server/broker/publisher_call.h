// What the calls of a publisher have in common: the memory that it may write to, as a message. Thread-safe.
#pragma once

#include "server/broker/publication.h"
#include "server/broker/service_context.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker {

// Describes `memory`, with a ticket for its descriptors, where it has any, that only the publisher can use.
v1::WritableSlabs DescribeWritable(const ServiceContext& context, const PublicationFacts& facts,
                                   const WritableMemory& memory);

}  // namespace weightbroker
