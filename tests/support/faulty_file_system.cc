#include "tests/support/faulty_file_system.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker::testing {

class FaultyFile : public File {
 public:
  FaultyFile(FaultyFileSystem& owner, std::unique_ptr<File> real) : owner_(owner), real_(std::move(real)) {}

  absl::StatusOr<int64_t> ReadAt(int64_t offset_bytes, std::span<std::byte> buffer) override {
    if (!owner_.OnRead(path(), offset_bytes)) return SystemError(absl::StrCat("read ", path()), EIO);
    const auto limit = static_cast<uint64_t>(owner_.max_read_bytes_);
    return real_->ReadAt(offset_bytes, buffer.first(std::min<uint64_t>(buffer.size(), limit)));
  }
  absl::StatusOr<FileStat> Stat() override {
    ASSIGN_OR_RETURN(FileStat stat, real_->Stat());
    for (const auto& [path_end, size_bytes] : owner_.sizes_) {
      if (absl::EndsWith(path(), path_end)) stat.size_bytes = size_bytes;
    }
    return stat;
  }
  const std::string& path() const override { return real_->path(); }
  bool IsCached(int64_t offset_bytes, int64_t size_bytes) override {
    return owner_.is_cached_ || offset_bytes + size_bytes <= owner_.cached_end_bytes_ || owner_.cached_questions_-- > 0;
  }
  int fd() const override { return real_->fd(); }

 private:
  FaultyFileSystem& owner_;
  const std::unique_ptr<File> real_;
};

// What goes wrong with a read goes wrong when it is begun; a failure is told when it is waited for.
class FaultyReadQueue : public ReadQueue {
 public:
  FaultyReadQueue(FaultyFileSystem& owner, std::unique_ptr<ReadQueue> real) : owner_(owner), real_(std::move(real)) {}

  absl::Status Start(File& file, int64_t offset_bytes, std::span<std::byte> buffer, uint64_t tag) override {
    {
      const std::lock_guard<std::mutex> lock(owner_.mutex_);
      ++owner_.queued_reads_;
    }
    if (owner_.queued_error_ != 0 || !owner_.OnRead(file.path(), offset_bytes)) {
      failed_.push_back(tag);
      return absl::OkStatus();
    }
    const auto limit = static_cast<uint64_t>(owner_.max_read_bytes_);
    return real_->Start(file, offset_bytes, buffer.first(std::min<uint64_t>(buffer.size(), limit)), tag);
  }

  Completion Wait() override {
    if (failed_.empty()) return real_->Wait();
    const uint64_t tag = failed_.back();
    failed_.pop_back();
    return {.tag = tag, .count = 0, .error_number = owner_.queued_error_ != 0 ? owner_.queued_error_ : EIO};
  }

 private:
  FaultyFileSystem& owner_;
  const std::unique_ptr<ReadQueue> real_;
  std::vector<uint64_t> failed_;
};

absl::StatusOr<std::unique_ptr<ReadQueue>> FaultyFileSystem::NewReadQueue(int depth) {
  const int number = ++queues_;
  if (refuses_queues_ || (refuses_queues_from_ > 0 && number >= refuses_queues_from_)) {
    return SystemError("io_uring_setup", EPERM);
  }
  ASSIGN_OR_RETURN(auto queue, real_.NewReadQueue(depth));
  return std::make_unique<FaultyReadQueue>(*this, std::move(queue));
}

void FaultyFileSystem::FailRead(const std::string& path_end, int64_t nth_read) {
  events_.push_back({path_end, nth_read, nullptr, false});
}

void FaultyFileSystem::BeforeRead(const std::string& path_end, int64_t nth_read, std::function<void()> change) {
  events_.push_back({path_end, nth_read, std::move(change), false});
}

int64_t FaultyFileSystem::reads() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t sum = 0;
  for (const auto& [path, count] : read_counts_) sum += count;
  return sum;
}

int64_t FaultyFileSystem::queued_reads() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return queued_reads_;
}

std::vector<int64_t> FaultyFileSystem::read_offsets() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return read_offsets_;
}

bool FaultyFileSystem::OnRead(const std::string& path, int64_t offset_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t count = ++read_counts_[path];
  read_offsets_.push_back(offset_bytes);
  for (Event& event : events_) {
    if (event.done || event.nth_read != count || !absl::EndsWith(path, event.path_end)) continue;
    event.done = true;
    if (!event.change) return false;
    event.change();
  }
  return true;
}

absl::StatusOr<std::unique_ptr<File>> FaultyFileSystem::Open(const std::string& path, ReadMode mode) {
  const auto refuse = [&](const char* name) {
    return MakeError(Reason::kCheckpointUnreadable, absl::StrCat(path, ": cannot be read: ", name),
                     {{"file", path}, {"errno", name}});
  };
  if (refuses_direct_ && mode == ReadMode::kDirect) return refuse("EINVAL");
  const auto ends_with = [&](const std::string& end) { return absl::EndsWith(path, end); };
  if (std::any_of(unopenable_.begin(), unopenable_.end(), ends_with)) return refuse("EACCES");
  ASSIGN_OR_RETURN(auto file, real_.Open(path, mode));
  return std::make_unique<FaultyFile>(*this, std::move(file));
}

}  // namespace weightbroker::testing
