#include <fcntl.h>

#include "absl/strings/str_cat.h"
#include "bench/bench_support.h"
#include "bench/load/ceilings.h"
#include "bench/load/parallel.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/unique_fd.h"

#ifdef WEIGHTBROKER_BENCH_URING
#include <liburing.h>

namespace weightbroker::bench {
namespace {

// One thread, `depth` requests in flight, each into a part of the buffer that is its own.
class Ring {
 public:
  static absl::StatusOr<std::unique_ptr<Ring>> Open(unsigned depth) {
    auto ring = std::make_unique<Ring>();
    if (const int result = io_uring_queue_init(depth, &ring->ring_, 0); result < 0) {
      return SystemError("io_uring_queue_init", -result);
    }
    ring->is_open_ = true;
    return ring;
  }
  Ring() = default;
  ~Ring() {
    if (is_open_) io_uring_queue_exit(&ring_);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  absl::Status Read(const std::vector<int>& files, const std::vector<FileRun>& runs, const Buffers& buffers) {
    size_t next = 0;
    for (int slot = 0; slot < buffers.count() && next < runs.size(); ++slot) {
      Submit(files, runs[next++], buffers[slot], slot);
    }
    for (size_t done = 0; done < runs.size(); ++done) {
      if (const int result = io_uring_submit_and_wait(&ring_, 1); result < 0) {
        return SystemError("io_uring_submit_and_wait", -result);
      }
      io_uring_cqe* entry = nullptr;
      if (const int result = io_uring_wait_cqe(&ring_, &entry); result < 0) {
        return SystemError("io_uring_wait_cqe", -result);
      }
      const int result = entry->res;
      const auto slot = static_cast<int>(entry->user_data);
      io_uring_cqe_seen(&ring_, entry);
      if (result <= 0) return SystemError("reading with io_uring", result < 0 ? -result : EIO);
      if (next < runs.size()) Submit(files, runs[next++], buffers[slot], slot);
    }
    return absl::OkStatus();
  }

 private:
  // There is always an entry: as many as buffers.
  void Submit(const std::vector<int>& files, const FileRun& run, std::span<std::byte> buffer, int slot) {
    io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
    io_uring_prep_read(entry, files[static_cast<size_t>(run.file)], buffer.data(), static_cast<unsigned>(buffer.size()),
                       static_cast<uint64_t>(run.offset_bytes));
    entry->user_data = static_cast<uint64_t>(slot);
  }

  io_uring ring_{};
  bool is_open_ = false;
};

}  // namespace

absl::StatusOr<nlohmann::ordered_json> ReadWithUring(const Task& task) {
  ASSIGN_OR_RETURN(const std::vector<FileRun> runs, DivideFiles(task));
  std::vector<UniqueFd> files;
  std::vector<int> fds;
  for (const std::string& path : task.files) {
    files.emplace_back(open(path.c_str(), O_RDONLY | O_CLOEXEC | (task.direct ? O_DIRECT : 0)));
    if (!files.back().valid()) return SystemError(absl::StrCat("opening ", path), errno);
    fds.push_back(files.back().get());
  }
  const Buffers buffers({.count = task.depth, .size_bytes = task.chunk_bytes, .huge_pages = task.huge_pages});
  ASSIGN_OR_RETURN(const std::unique_ptr<Ring> ring, Ring::Open(static_cast<unsigned>(task.depth)));
  int64_t bytes = 0;
  for (const FileRun& run : runs) bytes += run.size_bytes;
  const double start = NowSeconds();
  RETURN_IF_ERROR(ring->Read(fds, runs, buffers));
  return nlohmann::ordered_json{{"seconds", NowSeconds() - start}, {"bytes", bytes}};
}

}  // namespace weightbroker::bench

#else

namespace weightbroker::bench {

absl::StatusOr<nlohmann::ordered_json> ReadWithUring(const Task&) {
  return absl::UnimplementedError("built without liburing");
}

}  // namespace weightbroker::bench

#endif
