// What load_bench has measured, as tables for people. table.py prints the same and more from the JSON.
#pragma once

#include <nlohmann/json.hpp>

namespace weightbroker::bench {

void PrintReport(const nlohmann::ordered_json& report);

}  // namespace weightbroker::bench
