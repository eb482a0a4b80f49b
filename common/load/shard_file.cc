#include "common/load/shard_file.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

constexpr int64_t kBlock = kDirectAlignmentBytes;

int64_t RoundDown(int64_t value) { return value / kBlock * kBlock; }
int64_t RoundUp(int64_t value) { return RoundDown(value + kBlock - 1); }

// What file systems without O_DIRECT say, on open or only on read; EFAULT where they cannot read into pinned memory.
bool RefusesDirect(const absl::Status& status) {
  const auto metadata = GetErrorDetails(status).metadata;
  const auto name = metadata.find("errno");
  return name != metadata.end() &&
         (name->second == "EINVAL" || name->second == "EOPNOTSUPP" || name->second == "EFAULT");
}

}  // namespace

absl::StatusOr<std::unique_ptr<ShardFile>> ShardFile::Open(FileSystem& file_system, const std::string& folder,
                                                           const FileIdentity& identity) {
  std::unique_ptr<ShardFile> file(new ShardFile(file_system, absl::StrCat(folder, "/", identity.name), identity));
  auto direct = file->OpenChecked(ReadMode::kDirect);
  if (direct.ok()) {
    MutexLock lock(file->mutex_);
    file->direct_ = *std::move(direct);
    return file;
  }
  if (!RefusesDirect(direct.status())) return file->Explain(direct.status());
  RETURN_IF_ERROR(file->Buffered().status());
  return file;
}

absl::StatusOr<std::shared_ptr<File>> ShardFile::OpenChecked(ReadMode mode) {
  ASSIGN_OR_RETURN(std::shared_ptr<File> file, file_system_.Open(path_, mode));
  ASSIGN_OR_RETURN(const FileStat stat, file->Stat());
  RETURN_IF_ERROR(CheckFileUnchanged(identity_, stat, path_));
  return file;
}

std::shared_ptr<File> ShardFile::Direct() const {
  MutexLock lock(mutex_);
  return direct_;
}

void ShardFile::GiveUpDirect() {
  MutexLock lock(mutex_);
  direct_ = nullptr;
}

absl::StatusOr<std::shared_ptr<File>> ShardFile::Buffered() {
  MutexLock lock(mutex_);
  if (buffered_ == nullptr) {
    ASSIGN_OR_RETURN(buffered_, OpenChecked(ReadMode::kBuffered));
  }
  return buffered_;
}

absl::Status ShardFile::Explain(absl::Status error) {
  const auto now = file_system_.Stat(path_);
  if (now.ok()) RETURN_IF_ERROR(CheckFileUnchanged(identity_, *now, path_));
  return error;
}

// Reads blocks from RoundDown(begin_bytes) on, of which `done` bytes are there already. What a short read leaves off a
// block's edge is read through the page cache: it is the file's last part, or the file has become shorter.
absl::Status ShardFile::ReadDirect(File& file, size_t done, int64_t begin_bytes, int64_t end_bytes,
                                   std::span<std::byte> buffer) {
  const int64_t start = RoundDown(begin_bytes);
  const auto blocks = static_cast<size_t>(RoundUp(end_bytes) - start);
  bool at_end = done % kBlock != 0;
  while (start + static_cast<int64_t>(done) < end_bytes && !at_end) {
    ASSIGN_OR_RETURN(const int64_t count,
                     file.ReadAt(start + static_cast<int64_t>(done), buffer.subspan(done, blocks - done)));
    done += static_cast<size_t>(count);
    direct_bytes_ += count;
    at_end = count == 0 || done % kBlock != 0;
  }
  return ReadBuffered(start + static_cast<int64_t>(done), end_bytes, buffer.subspan(done));
}

absl::Status ShardFile::ReadBuffered(int64_t begin_bytes, int64_t end_bytes, std::span<std::byte> to) {
  if (begin_bytes >= end_bytes) return absl::OkStatus();
  ASSIGN_OR_RETURN(const auto buffered, Buffered());
  return buffered->ReadExactly(begin_bytes, to.first(static_cast<size_t>(end_bytes - begin_bytes)));
}

absl::Status ShardFile::ReadEither(int64_t begin_bytes, int64_t end_bytes, std::span<std::byte> buffer) {
  if (const auto direct = Direct(); direct != nullptr) {
    const absl::Status status = ReadDirect(*direct, 0, begin_bytes, end_bytes, buffer);
    if (!RefusesDirect(status)) return status;
    GiveUpDirect();
  }
  return ReadBuffered(begin_bytes, end_bytes,
                      buffer.subspan(static_cast<size_t>(begin_bytes - RoundDown(begin_bytes))));
}

absl::StatusOr<std::span<const std::byte>> ShardFile::Result(absl::Status status, int64_t begin_bytes,
                                                             int64_t end_bytes, std::span<const std::byte> buffer) {
  if (!status.ok()) return Explain(std::move(status));
  const auto skip = static_cast<size_t>(begin_bytes - RoundDown(begin_bytes));
  return buffer.subspan(skip, static_cast<size_t>(end_bytes - begin_bytes));
}

absl::StatusOr<std::span<const std::byte>> ShardFile::Read(int64_t begin_bytes, int64_t end_bytes,
                                                           std::span<std::byte> buffer) {
  return Result(ReadEither(begin_bytes, end_bytes, buffer), begin_bytes, end_bytes, buffer);
}

absl::StatusOr<std::span<const std::byte>> ShardFile::ReadCached(int64_t begin_bytes, int64_t end_bytes,
                                                                 std::span<std::byte> buffer) {
  const absl::Status status = ReadBuffered(begin_bytes, end_bytes, buffer);
  if (!status.ok()) return Explain(status);
  return buffer.first(static_cast<size_t>(end_bytes - begin_bytes));
}

ShardFile::Way ShardFile::WayTo(int64_t begin_bytes, int64_t end_bytes) const {
  const auto direct = Direct();
  const bool goes_past = direct != nullptr && !direct->IsCached(begin_bytes, end_bytes - begin_bytes);
  return goes_past ? Way::kDirect : Way::kCached;
}

bool ShardFile::IsOnStorage() const {
  constexpr int64_t kParts = 4;
  for (int64_t part = 1; part < kParts; ++part) {
    const int64_t at = identity_.stat.size_bytes / kParts * part;
    if (WayTo(at, std::min(at + kBlock, identity_.stat.size_bytes)) == Way::kDirect) return true;
  }
  return false;
}

bool ShardFile::Start(ReadQueue& queue, int64_t begin_bytes, int64_t end_bytes, std::span<std::byte> buffer,
                      uint64_t tag) {
  const auto direct = Direct();
  if (direct == nullptr) return false;
  const int64_t start = RoundDown(begin_bytes);
  const auto blocks = buffer.first(static_cast<size_t>(RoundUp(end_bytes) - start));
  return queue.Start(*direct, start, blocks, tag).ok();
}

absl::StatusOr<std::span<const std::byte>> ShardFile::Finish(const ReadQueue::Completion& read, int64_t begin_bytes,
                                                             int64_t end_bytes, std::span<std::byte> buffer) {
  if (read.error_number == EINTR || read.error_number == EAGAIN || read.error_number == ECANCELED) {
    return Read(begin_bytes, end_bytes, buffer);
  }
  if (read.error_number != 0) {
    const absl::Status error =
        SystemError(absl::StrCat("read ", path_, " at byte ", RoundDown(begin_bytes)), read.error_number);
    // It may be the ring that refuses, and not the file system: pread finds out.
    return RefusesDirect(error) ? Read(begin_bytes, end_bytes, buffer) : Explain(error);
  }
  const auto direct = Direct();
  direct_bytes_ += read.count;
  if (direct == nullptr) return Read(begin_bytes, end_bytes, buffer);  // another thread has found it refused meanwhile
  return Result(ReadDirect(*direct, static_cast<size_t>(read.count), begin_bytes, end_bytes, buffer), begin_bytes,
                end_bytes, buffer);
}

}  // namespace weightbroker
