#include "common/base/read_queue.h"

#include <liburing.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/file.h"
#include "common/base/mutex.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

// A ring's memory may come to lie where another thread's has gone. liburing maps by system calls of its own, which
// ThreadSanitizer does not see: only this order tells it that the one was over before the other began.
void OrderRings() {
  static Mutex mutex;
  const MutexLock lock(mutex);
}

class UringReadQueue : public ReadQueue {
 public:
  UringReadQueue() = default;
  UringReadQueue(const UringReadQueue&) = delete;
  UringReadQueue& operator=(const UringReadQueue&) = delete;

  ~UringReadQueue() override {
    if (!is_open_) return;
    while (under_way_ > 0) Wait();
    OrderRings();
    io_uring_queue_exit(&ring_);
  }

  absl::Status Open(int depth) {
    const int result = io_uring_queue_init(static_cast<unsigned>(depth), &ring_, 0);
    if (result < 0) return SystemError("io_uring_setup", -result);
    OrderRings();
    is_open_ = true;
    return absl::OkStatus();
  }

  absl::Status Start(File& file, int64_t offset_bytes, std::span<std::byte> buffer, uint64_t tag) override {
    if (is_broken_) return SystemError("io_uring_enter failed before", EIO);
    if (file.fd() < 0) return SystemError(absl::StrCat("io_uring: ", file.path(), " has no descriptor"), EBADF);
    io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
    if (entry == nullptr) return SystemError("io_uring: more reads than the queue is deep", EBUSY);
    io_uring_prep_read(entry, file.fd(), buffer.data(), static_cast<unsigned>(buffer.size()),
                       static_cast<uint64_t>(offset_bytes));
    io_uring_sqe_set_data64(entry, tag);
    RETURN_IF_ERROR(Submit());
    ++under_way_;
    return absl::OkStatus();
  }

  Completion Wait() override {
    io_uring_cqe* entry = nullptr;
    while (io_uring_wait_cqe(&ring_, &entry) != 0) std::this_thread::yield();  // a signal
    const Completion done = {.tag = io_uring_cqe_get_data64(entry),
                             .count = std::max(0, entry->res),
                             .error_number = std::max(0, -entry->res)};
    io_uring_cqe_seen(&ring_, entry);
    --under_way_;
    return done;
  }

 private:
  absl::Status Submit() {
    int result = io_uring_submit(&ring_);
    for (int tries = 0; result < 0 && IsPassing(result) && tries < kMaxTries; ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      result = io_uring_submit(&ring_);
    }
    if (result >= 0) return absl::OkStatus();
    // The entry is still in the ring: a later call would begin to read into a buffer that has gone.
    is_broken_ = true;
    return SystemError("io_uring_enter", -result);
  }

  // The kernel has no memory for it just now, or must be asked again.
  static bool IsPassing(int result) { return result == -EINTR || result == -EAGAIN || result == -EBUSY; }

  static constexpr int kMaxTries = 1000;

  io_uring ring_ = {};
  bool is_open_ = false;
  bool is_broken_ = false;
  int under_way_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ReadQueue>> NewUringReadQueue(int depth) {
  auto queue = std::make_unique<UringReadQueue>();
  RETURN_IF_ERROR(queue->Open(depth));
  return queue;
}

}  // namespace weightbroker
