// What load_bench measures in a fresh process of its own: a ceiling of the machine, or the arm that only reads. A task
// is told to the process on its command line as JSON; it answers with JSON.
//
//   ASSIGN_OR_RETURN(const nlohmann::ordered_json result, RunTaskInFreshProcess({.kind = "read_pread", ...}));
//   result["bytes"], result["seconds"]
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/process/spawn.h"

namespace weightbroker::bench {

struct Task {
  // read_pread, read_uring: reads files into buffers that are used again and again
  // copy: the same with memcpy from a mapping of the files
  // fill, write: makes a memfd from a buffer in cache, through a mapping or with write
  // plain_read: reads files into memory of its own, one after the other; with `digests` those of all tensors
  // pinned_copy: copies from pinned memory to GPUs, all at once
  // verify_gpu: see gpu_verify.h
  std::string kind = {};
  std::vector<std::string> files = {};
  std::string folder = {};   // plain_read with digests: the model's
  std::string digests = {};  // where to write them
  int64_t bytes = 0;         // how many of them all; fill, write, pinned_copy (to each GPU): how many
  int threads = 1;           // pinned_copy: streams to each GPU
  int depth = 1;             // read_uring: requests in flight of each thread
  int64_t chunk_bytes = 0;
  bool direct = false;  // past the page cache
  bool huge_pages = true;
  std::vector<std::string> devices = {};  // pinned_copy: UUIDs
  double started_at = 0;                  // plain_read
  std::vector<int64_t> slab_bytes = {};   // verify_gpu
};

nlohmann::ordered_json ToJson(const Task& task);

// What of a task is a method, for a report: everything but what is read.
nlohmann::ordered_json DescribeMethod(const Task& task);

// In the fresh process.
absl::StatusOr<nlohmann::ordered_json> RunTask(const std::string& json);

// The process gets `fds` besides. INTERNAL with what it wrote to stderr if it fails.
absl::StatusOr<nlohmann::ordered_json> RunTaskInFreshProcess(const Task& task, std::vector<FdMapping> fds = {});

// Runs a program of whose output the last line is JSON, and gives that. INTERNAL with the end of its stderr.
absl::StatusOr<nlohmann::ordered_json> RunForJson(SpawnOptions program);

}  // namespace weightbroker::bench
