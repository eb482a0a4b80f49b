// What the gauges of single objects say, made from what the registry and the machine say of themselves.
#pragma once

#include <vector>

#include "server/broker/health_facts.h"
#include "server/broker/object_gauges.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker {

// Devices that hold something, resident sets, and how far loads are.
ObjectGauges DescribeObjects(const std::vector<v1::WeightSet>& sets);

void AddMachineFacts(const HealthFacts::Facts& facts, ObjectGauges* objects);

}  // namespace weightbroker
