#include "bench/gpu/holder.h"

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker::bench {
namespace {

constexpr std::chrono::seconds kEndTime(60);

}  // namespace

Holder::Holder(std::string path, ChildProcess child, UniqueFd input, UniqueFd output)
    : path_(std::move(path)), child_(std::move(child)), input_(std::move(input)), output_(std::move(output)) {}

absl::StatusOr<std::unique_ptr<Holder>> Holder::Start(const std::string& path,
                                                      const std::vector<std::string>& arguments) {
  int to_child[2];
  int from_child[2];
  if (pipe2(to_child, O_CLOEXEC) != 0) return SystemError("pipe2", errno);
  const UniqueFd child_input(to_child[0]);
  UniqueFd input(to_child[1]);
  if (pipe2(from_child, O_CLOEXEC) != 0) return SystemError("pipe2", errno);
  UniqueFd output(from_child[0]);
  const UniqueFd child_output(from_child[1]);
  ASSIGN_OR_RETURN(
      ChildProcess child,
      Spawn({.path = path, .arguments = arguments, .fds = {{child_input.get(), 0}, {child_output.get(), 1}}}));
  return std::unique_ptr<Holder>(new Holder(path, std::move(child), std::move(input), std::move(output)));
}

Holder::~Holder() {
  input_.reset();
  if (!child_.Wait(kEndTime).ok()) child_.Kill(SIGKILL).IgnoreError();
  child_.Wait().IgnoreError();
}

absl::Status Holder::Send(const std::string& line) {
  const std::string text = line + "\n";
  if (write(input_.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size())) return absl::OkStatus();
  return SystemError(absl::StrCat("writing to ", path_), errno);
}

absl::StatusOr<std::string> Holder::ReadLine() {
  std::string line;
  char byte = 0;
  while (read(output_.get(), &byte, 1) == 1) {
    if (byte == '\n') return line;
    line += byte;
  }
  return MakeError(Reason::kProtocolError, absl::StrCat(path_, " has ended in the middle of a line: \"", line, "\""));
}

absl::Status Holder::Expect(const std::string& wanted) {
  ASSIGN_OR_RETURN(const std::string line, ReadLine());
  if (line == wanted) return absl::OkStatus();
  return MakeError(Reason::kProtocolError, absl::StrCat(path_, " said \"", line, "\" instead of ", wanted));
}

}  // namespace weightbroker::bench
