// What control_plane_bench found, as a table for people; as JSON it is printed as it is.
#pragma once

#include <nlohmann/json.hpp>

namespace weightbroker::bench {

void PrintTables(const nlohmann::json& report);

}  // namespace weightbroker::bench
