// Reads that are under way together, through the kernel's io_uring: one thread keeps a disk as busy as many that wait.
//
//   ASSIGN_OR_RETURN(const auto queue, file_system.NewReadQueue(/*depth=*/8));  // the system may have or allow none
//   RETURN_IF_ERROR(queue->Start(file, offset, buffer, /*tag=*/7));
//   const ReadQueue::Completion read = queue->Wait();             // read.tag == 7, and its count or error
//
// For one thread. Files and buffers must stay until their read has been waited for, or the queue has gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace weightbroker {

class File;

class ReadQueue {
 public:
  struct Completion {
    uint64_t tag = 0;
    int64_t count = 0;     // as of File::ReadAt: short reads are legal, 0 is the file's end
    int error_number = 0;  // an errno if it failed
  };

  // Waits for what is under way.
  virtual ~ReadQueue() = default;

  // Begins what File::ReadAt does at once. Not more than `depth` times more often than Wait. SYSTEM_ERROR if it could
  // not be begun; then there is nothing to wait for.
  virtual absl::Status Start(File& file, int64_t offset_bytes, std::span<std::byte> buffer, uint64_t tag) = 0;

  // Waits until any of the reads has ended; at least one is under way.
  virtual Completion Wait() = 0;
};

// A queue for files that have a descriptor. SYSTEM_ERROR with the errno where the kernel has no io_uring or does not
// let this process have one, as in many containers.
absl::StatusOr<std::unique_ptr<ReadQueue>> NewUringReadQueue(int depth);

}  // namespace weightbroker
