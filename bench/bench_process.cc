#include "bench/bench_process.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker::bench {

SocketFolder::SocketFolder() {
  char name[] = "/tmp/wb-bench-XXXXXX";
  if (mkdtemp(name) == nullptr) {
    perror("cannot make a folder in /tmp");
    exit(1);
  }
  path_ = name;
}

SocketFolder::~SocketFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

absl::StatusOr<MeasuringChild> MeasuringChild::Start(SpawnOptions options) {
  UniqueFd output(memfd_create("output", MFD_CLOEXEC));
  if (!output.valid()) return SystemError("memfd_create", errno);
  options.fds.push_back({output.get(), STDOUT_FILENO});
  ASSIGN_OR_RETURN(ChildProcess child, Spawn(options));
  return MeasuringChild(options.path, std::move(output), std::move(child));
}

absl::StatusOr<std::string> MeasuringChild::Finish() {
  ASSIGN_OR_RETURN(const ExitStatus exit, child_.Wait());
  if (!exit.success()) return absl::InternalError(absl::StrCat(path_, ": ", exit.ToString()));
  std::string text(static_cast<size_t>(lseek(output_.get(), 0, SEEK_END)), '\0');
  if (pread(output_.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    return SystemError("cannot read what the child measured", errno);
  }
  return text;
}

absl::StatusOr<std::string> RunAndRead(SpawnOptions options) {
  ASSIGN_OR_RETURN(MeasuringChild child, MeasuringChild::Start(std::move(options)));
  return child.Finish();
}

std::string OwnPath() { return std::filesystem::read_symlink("/proc/self/exe"); }

}  // namespace weightbroker::bench
