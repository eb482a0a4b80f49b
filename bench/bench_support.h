// What the benchmarks share: samples, a description of the machine, and a page cache known to be cold.
//
//   const Summary rate = Summarize(rates);
//   json["load_bytes_per_second"] = ToJson(rate);       // median, least, greatest, and every raw sample
//   json["machine"] = DescribeMachine();
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace weightbroker::bench {

// What a series of measurements of the same thing comes to. Percentiles are of the nearest rank.
struct Summary {
  double median = 0;
  double p90 = 0;
  double p99 = 0;
  double least = 0;
  double greatest = 0;
  std::vector<double> samples;  // in the order in which they were taken
};

// `samples` must not be empty.
Summary Summarize(std::vector<double> samples);
nlohmann::json ToJson(const Summary& summary);

// Processor, cores, memory, kernel, huge page settings, compiler, build type and version of this program: without them
// a figure cannot be compared with another.
nlohmann::json DescribeMachine();

// Seconds on the monotonic clock, CLOCK_MONOTONIC, for differences, also with those of another process.
double NowSeconds();

// As decimal digits that lose nothing, for a command line.
std::string Digits(double seconds);

// Writes a file's dirty pages out and drops it from the page cache. FAILED_PRECONDITION if some of its pages are still
// there after that (mincore): a figure for a cold read would be a lie.
absl::Status EvictFromPageCache(const std::string& path);

// How many bytes of a file are in the page cache now.
absl::StatusOr<int64_t> CachedBytes(const std::string& path);

}  // namespace weightbroker::bench
