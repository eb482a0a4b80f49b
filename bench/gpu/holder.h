// A process that a benchmark talks with by lines: one that holds weights, or one that waits for a word to go on.
//
//   ASSIGN_OR_RETURN(const auto holder, Holder::Start("/usr/bin/env", {"python3", "export.py"}));
//   RETURN_IF_ERROR(holder->Expect("ready"));
//   RETURN_IF_ERROR(holder->Send("go"));
//   ASSIGN_OR_RETURN(const std::string answer, holder->ReadLine());
//
// It is told to end by the end of its input. Not thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"
#include "common/process/spawn.h"

namespace weightbroker::bench {

class Holder {
 public:
  static absl::StatusOr<std::unique_ptr<Holder>> Start(const std::string& path,
                                                       const std::vector<std::string>& arguments);
  ~Holder();  // waits for its end, and kills it after a minute

  absl::Status Send(const std::string& line);
  absl::StatusOr<std::string> ReadLine();  // without its end; PROTOCOL_ERROR where the process has ended
  absl::Status Expect(const std::string& wanted);

 private:
  Holder(std::string path, ChildProcess child, UniqueFd input, UniqueFd output);

  const std::string path_;
  ChildProcess child_;
  UniqueFd input_;
  UniqueFd output_;
};

}  // namespace weightbroker::bench
