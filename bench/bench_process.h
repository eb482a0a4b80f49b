// What benchmarks that run in several processes share.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"
#include "common/process/spawn.h"

namespace weightbroker::bench {

// A folder with a short path, for sockets; removed with all that is in it.
class SocketFolder {
 public:
  SocketFolder();  // ends the program if it cannot be made
  ~SocketFolder();
  SocketFolder(const SocketFolder&) = delete;
  SocketFolder& operator=(const SocketFolder&) = delete;
  std::string operator/(const char* name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// A child and what it prints.
class MeasuringChild {
 public:
  static absl::StatusOr<MeasuringChild> Start(SpawnOptions options);

  // Waits for its end; INTERNAL unless that is a success. Gives its output.
  absl::StatusOr<std::string> Finish();

 private:
  MeasuringChild(std::string path, UniqueFd output, ChildProcess child)
      : path_(std::move(path)), output_(std::move(output)), child_(std::move(child)) {}

  std::string path_;
  UniqueFd output_;
  ChildProcess child_;
};

// Start and Finish in one.
absl::StatusOr<std::string> RunAndRead(SpawnOptions options);

// The program that is running.
std::string OwnPath();

}  // namespace weightbroker::bench
