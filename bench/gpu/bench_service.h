// A service of a benchmark's own, which holds one model until this object goes.
//
//   BenchService service({.bin_dir = bin_dir, .folder = folder, .socket = sockets / "node.sock"});
//   ASSIGN_OR_RETURN(const v1::WeightSet set, service.Start(request));   // resident
//
// Not thread-safe.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/process/spawn.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker::bench {

struct BenchServiceOptions {
  std::string bin_dir;  // where weightbrokerd is
  std::string folder;   // of the model
  std::string socket;
  std::vector<std::string> flags = {};  // of weightbrokerd, besides
};

class BenchService {
 public:
  explicit BenchService(BenchServiceOptions options) : options_(std::move(options)) {}
  ~BenchService();  // waits until it has ended, and kills it after a minute
  BenchService(const BenchService&) = delete;
  BenchService& operator=(const BenchService&) = delete;

  // Starts it, and registers the model as `request` says, for any torch; returns once that is resident.
  absl::StatusOr<v1::WeightSet> Start(v1::RegisterRequest request);

  const std::string& socket() const { return options_.socket; }

 private:
  const BenchServiceOptions options_;
  std::optional<ChildProcess> child_;
};

}  // namespace weightbroker::bench
