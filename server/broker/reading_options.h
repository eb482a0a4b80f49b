// How loaders are to read checkpoints; 0 and empty leave it to them.
#pragma once

#include <cstdint>
#include <string>

namespace weightbroker {

struct ReadingOptions {
  int reader_threads = 0;
  int reads_per_thread = 0;  // under way at once, with io_uring
  int64_t chunk_bytes = 0;   // of one read
  std::string method = {};   // "io_uring", "pread", or empty: io_uring where it is to be had
};

}  // namespace weightbroker
