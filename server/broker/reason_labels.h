// Reasons as values of a metric's label.
//
//   for (const std::string& reason : ReasonLabels()) family.Add({{"reason", reason}});     // each series is there at 0
//   family.Add({{"reason", ReasonLabel(GetErrorDetails(status).reason)}}).Increment();
//
// Thread-safe.
#pragma once

#include <string>
#include <vector>

namespace weightbroker {

// Every reason of ours, and OTHER. Never deleted.
const std::vector<std::string>& ReasonLabels();

// `reason` if it is one of ours, else OTHER: what a caller says must not make series without end.
std::string ReasonLabel(const std::string& reason);

}  // namespace weightbroker
