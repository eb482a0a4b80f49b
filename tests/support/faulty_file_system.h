// A FileSystem that passes everything on to another one, and goes wrong where a test wants it to.
//
//   FaultyFileSystem files(RealFileSystem());
//   files.FailRead("model.safetensors", /*nth_read=*/3);   // the third read of a file of that name gives EIO
//   OpenCheckpoint(files, dir);
//
// Faults are set before use; then it is thread-safe. Paths are matched by their end.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/base/file.h"

namespace weightbroker::testing {

class FaultyFileSystem : public FileSystem {
 public:
  explicit FaultyFileSystem(FileSystem& real) : real_(real) {}

  // No read gives more than `bytes`.
  void ShortenReads(int64_t bytes) { max_read_bytes_ = bytes; }

  // Opening with ReadMode::kDirect is refused with EINVAL, as tmpfs and overlayfs do.
  void RefuseDirect() { refuses_direct_ = true; }

  // There is no io_uring to be had, as in many containers.
  void RefuseReadQueues() { refuses_queues_ = true; }

  // Of the queues that are asked for, the `nth` (from 1) and those after it are refused.
  void RefuseReadQueuesFrom(int nth) { refuses_queues_from_ = nth; }

  // Each read that a queue has taken ends with this errno.
  void EndQueuedReadsWith(int error_number) { queued_error_ = error_number; }

  // The page cache has what IsCached is asked for; otherwise it has nothing, whatever the system says.
  void PretendCached() { is_cached_ = true; }

  // The same of what lies before `end_bytes` of a file.
  void PretendCachedBefore(int64_t end_bytes) { cached_end_bytes_ = end_bytes; }

  // The same for so many questions; then it has lost everything.
  void PretendCachedFor(int questions) { cached_questions_ = questions; }

  // The `nth_read` (from 1, counted over all openings of the file) gives EIO.
  void FailRead(const std::string& path_end, int64_t nth_read);

  // Opening the file gives EACCES.
  void FailOpen(const std::string& path_end) { unopenable_.push_back(path_end); }

  // Calls `change` once, just before the `nth_read` of the file: to truncate, replace, edit or grow it.
  void BeforeRead(const std::string& path_end, int64_t nth_read, std::function<void()> change);

  // An open file of that name says that it has `size_bytes`, whatever it has.
  void PretendSize(const std::string& path_end, int64_t size_bytes) { sizes_[path_end] = size_bytes; }

  // How many reads all files have had together, and how many of them through a queue.
  int64_t reads() const;
  int64_t queued_reads() const;

  // Where each began, in the order in which they did.
  std::vector<int64_t> read_offsets() const;

  absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path, ReadMode mode) override;
  absl::StatusOr<std::unique_ptr<ReadQueue>> NewReadQueue(int depth) override;
  absl::StatusOr<FileStat> Stat(const std::string& path) override { return real_.Stat(path); }
  absl::StatusOr<std::string> RealPath(const std::string& path) override { return real_.RealPath(path); }
  absl::StatusOr<std::vector<std::string>> ListFolder(const std::string& path) override {
    return real_.ListFolder(path);
  }

 private:
  friend class FaultyFile;
  friend class FaultyReadQueue;

  struct Event {
    std::string path_end;
    int64_t nth_read = 0;
    std::function<void()> change;  // empty: the read fails
    bool done = false;
  };

  // Counts a read; runs what is due. False if the read is to fail.
  bool OnRead(const std::string& path, int64_t offset_bytes);

  FileSystem& real_;
  int64_t max_read_bytes_ = INT64_MAX;
  bool refuses_direct_ = false;
  bool refuses_queues_ = false;
  int refuses_queues_from_ = 0;
  int queued_error_ = 0;
  std::atomic<int> queues_{0};
  bool is_cached_ = false;
  int64_t cached_end_bytes_ = 0;
  std::atomic<int> cached_questions_{0};
  std::vector<std::string> unopenable_;
  std::map<std::string, int64_t> sizes_;

  mutable std::mutex mutex_;
  std::vector<Event> events_;                   // guarded by mutex_
  std::map<std::string, int64_t> read_counts_;  // guarded by mutex_
  int64_t queued_reads_ = 0;                    // guarded by mutex_
  std::vector<int64_t> read_offsets_;           // guarded by mutex_
};

}  // namespace weightbroker::testing
