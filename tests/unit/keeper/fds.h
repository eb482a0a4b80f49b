// Descriptors to store, and what can be said of them. For the keeper's tests.
#pragma once

#include <dirent.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "common/base/unique_fd.h"

namespace weightbroker::testing {

inline UniqueFd MakeMemfd(const std::string& contents) {
  UniqueFd memfd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (pwrite(memfd.get(), contents.data(), contents.size(), 0) != static_cast<ssize_t>(contents.size())) return {};
  return memfd;
}

inline std::string ContentsOf(int fd) {
  struct stat file = {};
  if (fstat(fd, &file) != 0) return "<not open>";
  std::string contents(static_cast<size_t>(file.st_size), '\0');
  if (pread(fd, contents.data(), contents.size(), 0) != file.st_size) return "<not readable>";
  return contents;
}

// How many descriptors this process has open.
inline int CountOpenFds() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

}  // namespace weightbroker::testing
