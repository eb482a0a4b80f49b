#include "common/base/random_bytes.h"

#include <sys/random.h>

#include <cerrno>
#include <cstdlib>

#include "common/base/log.h"

namespace weightbroker {

std::string RandomBytes(size_t count) {
  std::string bytes(count, '\0');
  // Up to 256 bytes come whole once the kernel's generator has been seeded.
  while (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    if (errno == EINTR) continue;
    Log(LogLevel::kError, "random.no_bytes");
    std::abort();
  }
  return bytes;
}

}  // namespace weightbroker
