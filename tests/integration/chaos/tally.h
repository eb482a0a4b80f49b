// What an engine of the chaos has done, in a file that it maps: the counts outlive an engine that is killed.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "common/base/unique_fd.h"

namespace weightbroker::testing {

struct Tally {
  int64_t attached = 0;
  int64_t verified = 0;          // of these, with every digest taken before Attach returned
  int64_t published = 0;         // by this engine
  int64_t compared_bytes = 0;    // and found right
  int64_t publish_failures = 0;  // whose publication ended under it, or whose set was unregistered by someone
  int64_t exported = 0;          // attached by CUDA IPC, to memory of a process that may be killed
  int64_t export_refusals = 0;   // because it was, or its successor's weights were not there yet
  int64_t left = 0;              // of its own accord
};

inline constexpr int kWrongBytes = 42;    // an engine's exit code, having said on stderr where
inline constexpr int kCannotAttach = 43;  // likewise, having said why
inline constexpr int kCannotRead = 44;    // likewise

// Maps the tally in `path`, which is created where it is missing. Stops the program if the system refuses.
inline Tally* MapTally(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  void* data = MAP_FAILED;
  if (fd.valid() && ftruncate(fd.get(), sizeof(Tally)) == 0) {
    data = mmap(nullptr, sizeof(Tally), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  }
  if (data == MAP_FAILED) {
    perror(path.c_str());
    abort();
  }
  return static_cast<Tally*>(data);
}

}  // namespace weightbroker::testing
