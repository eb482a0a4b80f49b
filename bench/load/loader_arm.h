// Our own arm: weightbroker-loader, a real one in a process of its own, to which this program plays the broker.
//
//   ASSIGN_OR_RETURN(const CheckpointIdentity identity, ReadCheckpointIdentity(RealFileSystem(), folder));
//   ASSIGN_OR_RETURN(const Sample sample, RunLoader({.loader = path, .identity = identity}, /*verify=*/false));
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/load/sample.h"
#include "common/identity/checkpoint_identity.h"

namespace weightbroker::bench {

struct LoaderTask {
  std::string loader = {};  // the program's path
  CheckpointIdentity identity = {};
  std::vector<std::string> devices = {"host"};  // one for each rank: UUIDs, or "host"; as many as the weights are split
  std::string quantization = {};                // empty, or "fp8_block"
  int reader_threads = 0;                       // 0, 0, 0 and empty: the loader chooses
  int reads_per_thread = 0;
  int64_t chunk_bytes = 0;
  std::string read_method = {};
};

// With `verify` what was handed over is mapped, of GPU memory by another process, and each tensor's bytes must have the
// digest that its manifest says (DIGEST_MISMATCH). The sample has the manifest's digests if the weights are whole and
// as they are in the files. What the figures say beside load and exec:
//   handed_over_bytes   of all slabs                  planned_seconds   from exec to the plan
//   read_bytes          what the loader says that it read
//   and LoadReport's fields, where the loader fills them in. `load_clock` says what load_seconds is: "report", from the
//   process's main to the end but for waiting for contexts; or "events", which cannot tell waiting for contexts from
//   allocating memory, and leaves both out.
absl::StatusOr<Sample> RunLoader(const LoaderTask& task, bool verify);

}  // namespace weightbroker::bench
